"""What a Qwen2.5-VL checkpoint directory says about its model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from rollplex.core.errors import BadInput

SUPPORTED_MODEL_TYPE = "qwen2_5_vl"
VOCAB_ALIGNMENT = 64
"""What vLLM pads the vocabulary to."""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that decide shapes, positions and special tokens; `vision` is transformers' own tower config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Channel pairs rotated by the temporal, height and width position; sums to head_size / 2."""
    max_positions: int
    tie_word_embeddings: bool
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    spatial_merge_size: int
    tokens_per_second: float
    vision: Qwen2_5_VLVisionConfig

    def padded_vocab(self, tp: int) -> int:
        """Rows of embedding and head: the rollout engine's padding, and divisible by the TP size."""
        alignment = math.lcm(VOCAB_ALIGNMENT, tp)
        return -(-self.vocab_size // alignment) * alignment

    @property
    def patch_width(self) -> int:
        """Numbers in one patch of an image or video: channels x frames x height x width."""
        return self.vision.in_channels * self.vision.temporal_patch_size * self.vision.patch_size**2

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Never part of a response: the training forward would take them for media."""
        ids = {self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id}
        return tuple(sorted(token for token in ids if 0 <= token < self.vocab_size))


def read_model_config(checkpoint: Path) -> ModelConfig:
    """Read `config.json` (nested or the older flat form) and, where present, `generation_config.json`."""
    raw = _read_json(checkpoint, "config.json")
    found = raw.get("model_type")
    if found != SUPPORTED_MODEL_TYPE:
        raise BadInput(
            f"{checkpoint} holds a model of type {found!r}; supported is {SUPPORTED_MODEL_TYPE!r} (Qwen2.5-VL)",
            reason="UNSUPPORTED_ARCHITECTURE",
            found=found,
            supported=SUPPORTED_MODEL_TYPE,
        )
    if not isinstance(raw.get("vision_config"), dict):
        raise BadInput(f"{checkpoint}/config.json has no vision_config", reason="BAD_MODEL_CONFIG")
    eos = None
    pad = None
    if (checkpoint / "generation_config.json").is_file():
        generation = _read_json(checkpoint, "generation_config.json")
        eos, pad = generation.get("eos_token_id"), generation.get("pad_token_id")
    try:
        return _from_hf(Qwen2_5_VLConfig.from_dict(raw), eos, pad)
    except BadInput:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise BadInput(f"{checkpoint}/config.json: {error}", reason="BAD_MODEL_CONFIG") from error


def _from_hf(config: Qwen2_5_VLConfig, eos: int | list[int] | None, pad: int | None) -> ModelConfig:
    text, vision = config.text_config, config.vision_config
    if text.use_sliding_window and text.sliding_window:
        raise BadInput("sliding-window attention is not supported", reason="UNSUPPORTED_ARCHITECTURE")
    if text.hidden_act != "silu":
        raise BadInput(f"hidden_act {text.hidden_act!r}; supported is 'silu'", reason="UNSUPPORTED_ARCHITECTURE")
    rope = text.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "mrope"):
        raise BadInput(
            f"rope_type {rope['rope_type']!r}; supported is 'default' with mrope_section",
            reason="UNSUPPORTED_ARCHITECTURE",
        )
    head_size = text.hidden_size // text.num_attention_heads
    section = tuple(rope.get("mrope_section", (16, 24, 24)))
    if sum(section) * 2 != head_size:
        raise BadInput(
            f"mrope_section {list(section)} covers {sum(section)} channel pairs; heads of {head_size} have {head_size // 2}",
            reason="BAD_MODEL_CONFIG",
        )
    if vision.out_hidden_size != text.hidden_size:
        raise BadInput(
            f"vision out_hidden_size {vision.out_hidden_size} differs from hidden_size {text.hidden_size}",
            reason="BAD_MODEL_CONFIG",
        )
    eos = text.eos_token_id if eos is None else eos
    return ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        layer_count=text.num_hidden_layers,
        head_count=text.num_attention_heads,
        kv_head_count=text.num_key_value_heads,
        head_size=head_size,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        mrope_section=section,
        max_positions=text.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        vision_end_token_id=config.vision_end_token_id,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        pad_token_id=text.pad_token_id if pad is None else pad,
        spatial_merge_size=vision.spatial_merge_size,
        tokens_per_second=vision.tokens_per_second,
        vision=vision,
    )


def _read_json(checkpoint: Path, name: str) -> dict:
    if not checkpoint.is_dir():
        raise BadInput(f"checkpoint directory {checkpoint} does not exist", reason="CHECKPOINT_MISSING")
    path = checkpoint / name
    if not path.is_file():
        raise BadInput(f"{checkpoint} has no {name}: not a checkpoint directory", reason="CHECKPOINT_INCOMPLETE")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid JSON: {error}", reason="BAD_MODEL_CONFIG") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path} holds no JSON object", reason="BAD_MODEL_CONFIG")
    return content
