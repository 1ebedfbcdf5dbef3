"""Shapes of every parameter of a Qwen2.5-VL model, from its config.json alone: no torch, no weights.

Names are rollout's (vLLM's) and training's, as in `rollplex.model.layout`; a test compares the two.
Legend: D hidden, I intermediate, H query heads, K kv heads, d head size, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.core.tensor_maps import Axis, padded_vocabulary

VOCAB_ALIGNMENT = 64
"""What vLLM pads the vocabulary to."""


@dataclass(frozen=True, slots=True)
class VisionShapes:
    """The tower and its merger; defaults are transformers'."""

    depth: int = 32
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    window_size: int = 112
    """Pixels of a side of the windows in which most blocks attend."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Blocks that attend to the whole frame."""

    @property
    def window_patches(self) -> int:
        """Patches of one whole window."""
        side = self.window_size // self.spatial_merge_size // self.patch_size * self.spatial_merge_size
        return side * side


@dataclass(frozen=True, slots=True)
class ModelShapes:
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    vocab_size: int
    tie_word_embeddings: bool
    vision: VisionShapes
    nominal_parameters: int | None = None
    """What the publisher calls the language model's size, where that is known."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.head_count or self.head_count % self.kv_head_count:
            raise BadInput(f"hidden size {self.hidden_size}, {self.head_count} heads and {self.kv_head_count} kv heads: each "
                           "must divide the one before", reason="BAD_MODEL_CONFIG")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.head_count

    def padded_vocab(self, train_tp: int) -> int:
        """Rows of embedding and head in both engines: rollout's padding, and divisible by training's degree."""
        return padded_vocabulary(self.vocab_size, VOCAB_ALIGNMENT, train_tp)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One training parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole, without vocabulary padding."""
    axis: Axis = Axis.NONE
    heads: int | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor as rollout holds it, and the training parameters that it is made of, in order."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def is_vision(self) -> bool:
        return self.name.startswith("visual.")

    @property
    def element_count(self) -> int:
        return sum(parameter.element_count for parameter in self.parameters)


def read_shapes(path: Path) -> ModelShapes:
    """From a config.json or the folder that holds it. Raises BadInput naming what is wrong."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist", reason="CHECKPOINT_MISSING", path=file) from None
    except ValueError as error:
        raise BadInput(f"{file} is not valid JSON: {error}", reason="BAD_MODEL_CONFIG", path=file) from error
    return shapes_from_config(raw, str(file))


def shapes_from_config(raw: Any, where: str) -> ModelShapes:
    """Takes the nested form (text_config) and the older flat one."""
    if not isinstance(raw, Mapping) or raw.get("model_type") != "qwen2_5_vl":
        found = raw.get("model_type") if isinstance(raw, Mapping) else None
        raise BadInput(f"{where} is of a model of type {found!r}; supported is 'qwen2_5_vl' (Qwen2.5-VL)",
                       reason="UNSUPPORTED_ARCHITECTURE", found=found)
    vision, text = raw.get("vision_config"), raw.get("text_config", raw)
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        raise BadInput(f"{where} has no vision_config", reason="BAD_MODEL_CONFIG")

    def number(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = source.get(key, default)
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, int) or value < 1:
            raise BadInput(f"{where}: {key} is {value!r}; it must be a positive integer", reason="BAD_MODEL_CONFIG")
        return value

    defaults = VisionShapes()
    full = vision.get("fullatt_block_indexes", list(defaults.fullatt_block_indexes))
    if not isinstance(full, list) or not all(isinstance(index, int) for index in full):
        raise BadInput(f"{where}: fullatt_block_indexes is {full!r}; it must be a list of block numbers",
                       reason="BAD_MODEL_CONFIG")
    sizes = [key for key in VisionShapes.__slots__ if key != "fullatt_block_indexes"]
    heads = number(text, "num_attention_heads")
    nominal = raw.get("nominal_language_parameters")
    return ModelShapes(
        number(text, "hidden_size"), number(text, "intermediate_size"), number(text, "num_hidden_layers"), heads,
        number(text, "num_key_value_heads", heads), number(text, "vocab_size"),
        bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        VisionShapes(**{key: number(vision, key, getattr(defaults, key)) for key in sizes},
                     fullatt_block_indexes=tuple(full)),
        nominal if isinstance(nominal, int) else None)


def model_tensors(shapes: ModelShapes) -> Iterator[ModelTensor]:
    """Top to bottom, as rollout's slab has them."""
    yield from vision_tensors(shapes.vision)
    yield from decoder_tensors(shapes)


def vision_tensors(vision: VisionShapes) -> Iterator[ModelTensor]:
    """The tower, whole on every rank."""
    width, inner = vision.hidden_size, vision.intermediate_size
    merged = width * vision.spatial_merge_size**2

    def plain(name: str, *shape: int) -> ModelTensor:
        return ModelTensor(f"visual.{name}", (Parameter(f"visual.{name}", shape),))

    yield plain("patch_embed.proj.weight", width, vision.in_channels, vision.temporal_patch_size, vision.patch_size,
                vision.patch_size)
    for index in range(vision.depth):
        block = f"blocks.{index}"
        for name, shape in (("norm1.weight", (width,)), ("norm2.weight", (width,)), ("attn.qkv.weight", (3 * width, width)),
                            ("attn.qkv.bias", (3 * width,)), ("attn.proj.weight", (width, width)),
                            ("attn.proj.bias", (width,))):
            yield plain(f"{block}.{name}", *shape)
        for kind, shape in (("weight", (inner, width)), ("bias", (inner,))):
            yield ModelTensor(f"visual.{block}.mlp.gate_up_proj.{kind}", tuple(
                Parameter(f"visual.{block}.mlp.{half}_proj.{kind}", shape) for half in ("gate", "up")))
        yield plain(f"{block}.mlp.down_proj.weight", width, inner)
        yield plain(f"{block}.mlp.down_proj.bias", width)
    yield plain("merger.ln_q.weight", width)
    for layer, rows in ((0, merged), (2, vision.out_hidden_size)):
        yield plain(f"merger.mlp.{layer}.weight", rows, merged)
        yield plain(f"merger.mlp.{layer}.bias", rows)


def decoder_tensors(shapes: ModelShapes) -> Iterator[ModelTensor]:
    """Embedding, layers, norm and, unless tied, head."""
    hidden, inner, size, vocab = shapes.hidden_size, shapes.intermediate_size, shapes.head_size, shapes.vocab_size
    heads, kv_heads = shapes.head_count, shapes.kv_head_count

    def one(rollout: str, training: str, axis: Axis, *shape: int) -> ModelTensor:
        return ModelTensor(f"language_model.{rollout}", (Parameter(training, shape, axis),))

    yield one("model.embed_tokens.weight", "language_model.embed_tokens.weight", Axis.VOCAB, vocab, hidden)
    for index in range(shapes.layer_count):
        layer, name = f"model.layers.{index}", f"language_model.layers.{index}"
        yield one(f"{layer}.input_layernorm.weight", f"{name}.input_layernorm.weight", Axis.NONE, hidden)
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            yield ModelTensor(f"language_model.{layer}.self_attn.qkv_proj.{kind}", tuple(
                Parameter(f"{name}.self_attn.{part}_proj.{kind}", (count * size, *tail), Axis.ROWS, count)
                for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))))
        yield one(f"{layer}.self_attn.o_proj.weight", f"{name}.self_attn.o_proj.weight", Axis.COLS, hidden, heads * size)
        yield one(f"{layer}.post_attention_layernorm.weight", f"{name}.post_attention_layernorm.weight", Axis.NONE, hidden)
        yield ModelTensor(f"language_model.{layer}.mlp.gate_up_proj.weight", tuple(
            Parameter(f"{name}.mlp.{half}_proj.weight", (inner, hidden), Axis.ROWS) for half in ("gate", "up")))
        yield one(f"{layer}.mlp.down_proj.weight", f"{name}.mlp.down_proj.weight", Axis.COLS, hidden, inner)
    yield one("model.norm.weight", "language_model.norm.weight", Axis.NONE, hidden)
    if not shapes.tie_word_embeddings:
        yield one("lm_head.weight", "lm_head.weight", Axis.VOCAB, vocab, hidden)
