"""A small Qwen2.5-VL checkpoint directory, randomly initialised: config, weights, tokenizer, processor files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rollplex.demo.clips import FRAME_PX
from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer  # noqa: E402

VOCAB_SIZE = 384  # 6 x 64: splits over 2, 4 and 8 tensor-parallel ranks
_PATCH_PX, _MERGE, _TEMPORAL_PATCH = 14, 2, 2
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _MLP = 128, 2, 4, 2, 256
_VISION_HIDDEN, _VISION_DEPTH, _VISION_HEADS, _VISION_MLP = 64, 2, 4, 128
# Wide initialisation and few positions: with Qwen's 0.02 and 1e6 a model this small stays at chance for minutes.
_EMBEDDING_STD, _VISION_STD, _DECODER_STD, _ROPE_THETA = 0.08, 0.05, 0.05, 10.0
# OpenAI CLIP's statistics, as every Qwen-VL uses them.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def build_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The architecture of the demo model; token ids come from the tokenizer."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _ID_TOKENS}
    head_dim = _HIDDEN // _HEADS
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": tokenizer.model_max_length,
        "rms_norm_eps": 1e-6,
        # Time, height and width share the head_dim / 2 rotary frequencies in Qwen's proportion 1 : 1.5 : 1.5.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _ROPE_THETA,
            "mrope_section": [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16],
        },
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["im_end"],
        "pad_token_id": ids["endoftext"],
    }
    vision = {
        "depth": _VISION_DEPTH,
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": _VISION_MLP,
        "num_heads": _VISION_HEADS,
        "out_hidden_size": _HIDDEN,
        "patch_size": _PATCH_PX,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _TEMPORAL_PATCH,
        # At 2 frames a second a temporal step is then one position, and the text after a video starts at the same position
        # by the model's definition and by transformers 5, which otherwise disagree.
        "tokens_per_second": 1,
        "window_size": 4 * _PATCH_PX * _MERGE,
        "fullatt_block_indexes": [_VISION_DEPTH - 1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )


_ID_TOKENS = ("endoftext", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")


def build_model(config: Qwen2_5_VLConfig, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A float32 model with random weights; matrices normal with a standard deviation by module, biases zero, norms one."""
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_embedding = "embed_tokens" in name
                std = _EMBEDDING_STD if is_embedding else _VISION_STD if "visual" in name else _DECODER_STD
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def save_checkpoint(directory: Path, model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> int:
    """Write a Hugging Face checkpoint directory; returns the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for name, content in _processor_files().items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _processor_files() -> dict[str, dict[str, object]]:
    """The image and video processors' files. The smallest size is one merged patch, so a demo frame is never resized."""
    shared = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "patch_size": _PATCH_PX,
        "temporal_patch_size": _TEMPORAL_PATCH,
        "merge_size": _MERGE,
        "size": {"shortest_edge": (_PATCH_PX * _MERGE) ** 2, "longest_edge": (4 * FRAME_PX) ** 2},
        "processor_class": "Qwen2_5_VLProcessor",
    }
    return {
        "preprocessor_config.json": shared | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": shared
        | {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False, "cap_pixels_per_frame": False},
    }
