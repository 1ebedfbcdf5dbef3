"""A Hugging Face checkpoint of a published shape with random weights, made on the GPU where there is one.

Matrices are normal with standard deviation 1 / sqrt(inputs), those that write to the residual stream divided by
sqrt(2 layers), so that activations and logits stay near 1 at any depth; biases are zero, norms one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import rollplex.core
from rollplex.bench.tokenizer import build_tokenizer
from rollplex.demo.checkpoint import IMAGE_MEAN, IMAGE_STD
from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from safetensors.torch import save_file  # noqa: E402
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

PUBLISHED = {"3b": "Qwen2.5-VL-3B", "7b": "Qwen2.5-VL-7B", "32b": "Qwen2.5-VL-32B"}
TINY: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "use_sliding_window": False, "tie_word_embeddings": False,
    "bos_token_id": 300, "eos_token_id": 302, "vision_start_token_id": 309, "vision_end_token_id": 310,
    "image_token_id": 312, "video_token_id": 313,
    "vision_config": {"depth": 2, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                      "in_channels": 3, "out_hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
                      "fullatt_block_indexes": [1], "tokens_per_second": 2, "temporal_patch_size": 2}}
"""For a CPU, to try a benchmark's every step."""
SMALL = {"tiny": TINY, "tiny8": TINY | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
                                        "vision_config": TINY["vision_config"] | {"out_hidden_size": 128}}}
"""The second for up to eight ranks."""
HALVED = {"32b-half": "32b"}
"""Half the language model's layers, every width and the whole tower as they are: on half of the GPUs, at half of the
tensor-parallel degrees, a GPU holds as much as one of the whole model on all of them."""
SHAPES = (*SMALL, *PUBLISHED, *HALVED)
SHARD_BYTES = 2 << 30
WRITERS = 4
LARGEST_FRAME_TOKENS = 2048
"""What the processors keep of one frame; larger ones would be scaled down."""
RESIDUAL = ("o_proj.weight", "down_proj.weight", "attn.proj.weight")


def raw_config(shape: str) -> dict[str, Any]:
    """config.json of a published shape, of half of one, or of a small one."""
    if shape in SMALL:
        return SMALL[shape]
    if shape in HALVED:
        whole = raw_config(HALVED[shape])
        return whole | {"num_hidden_layers": whole["num_hidden_layers"] // 2}
    # A path, since rollplex.model would import what no benchmark's data needs.
    folder = Path(rollplex.core.__file__).parents[1] / "model" / "published"
    raw = json.loads((folder / f"{PUBLISHED[shape]}.json").read_text())
    raw.pop("nominal_language_parameters", None)
    return raw


def build_checkpoint(directory: Path, shape: str, *, seed: int, device: str, dtype: str = "bfloat16") -> int:
    """Writes the whole directory; returns the bytes of its weights, which shape, seed and kind of device decide."""
    return _write_weights(directory, _weights(describe_checkpoint(directory, shape, dtype=dtype), seed, device))


def describe_checkpoint(directory: Path, shape: str, *, dtype: str = "bfloat16") -> Qwen2_5_VLConfig:
    """All of it but the weights: the model's config, tokenizer and processor."""
    raw = raw_config(shape)
    config = Qwen2_5_VLConfig.from_dict(raw)
    config.dtype = getattr(torch, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(raw["vocab_size"], raw["bos_token_id"], raw["max_position_embeddings"])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.text_config.eos_token_id, config.text_config.pad_token_id = end, pad
    config.save_pretrained(directory)
    GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=[end, pad], pad_token_id=pad).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for name, content in _processor_files(raw["vision_config"]).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return config


def _weights(config: Qwen2_5_VLConfig, seed: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator(device).manual_seed(seed)
    depth = {"visual": config.vision_config.depth, "language_model": config.text_config.num_hidden_layers}
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=config.dtype, device=device)
            continue
        std = math.prod(shape[1:]) ** -0.5
        if name.endswith(RESIDUAL):
            std /= math.sqrt(2 * next(layers for part, layers in depth.items() if part in name))
        tensor = torch.empty(shape, dtype=config.dtype, device=device)
        yield name, tensor.normal_(0.0, std, generator=generator)


def _write_weights(directory: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Shards are written side by side: one file at a time would leave most of a disk idle."""
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    file_of: dict[str, int] = {}
    total = size = number = 0
    pending: dict[str, torch.Tensor] = {}
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        def flush() -> None:
            # At most as many shards wait in host memory as are written.
            if len(writes) >= WRITERS:
                writes[-WRITERS].result()
            writes.append(pool.submit(save_file, dict(pending), str(directory / f"shard-{number}"), {"format": "pt"}))
            pending.clear()

        for name, tensor in weights:
            if pending and size + tensor.nbytes > SHARD_BYTES:
                flush()
                number, size = number + 1, 0
            pending[name] = tensor.cpu()
            file_of[name] = number
            size, total = size + tensor.nbytes, total + tensor.nbytes
        flush()
        for write in writes:
            write.result()
    names = [f"model-{index + 1:05d}-of-{number + 1:05d}.safetensors" for index in range(number + 1)]
    for index, name in enumerate(names):
        (directory / f"shard-{index}").replace(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[place] for name, place in file_of.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _processor_files(vision: dict[str, Any]) -> dict[str, dict[str, Any]]:
    factor = vision["patch_size"] * vision["spatial_merge_size"]
    shared = {
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
        "image_mean": list(IMAGE_MEAN), "image_std": list(IMAGE_STD), "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"], "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 4 * factor**2, "longest_edge": LARGEST_FRAME_TOKENS * factor**2},
        "processor_class": "Qwen2_5_VLProcessor"}
    return {
        "preprocessor_config.json": shared | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": shared | {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False,
                                                    "cap_pixels_per_frame": False}}
