"""The actor's bytes on one device: what rollout holds, and the same bytes under training's names.

One slab a device, every tensor at a 256-byte boundary. Rollout names and fusions are vLLM's at TP = 1; a fused tensor's
parts are row slabs, so training sees each as a tensor of its own without a copy.
Legend: D hidden, I intermediate, H query heads, K kv heads, d head size, V padded vocabulary; h, k, i, v per rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rollplex.core.errors import BadInput
from rollplex.core.placement import ITEM_BYTES, Placement, align_up
from rollplex.model.config import ModelConfig

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Shard:
    """How one rank's part of a parameter is cut from the whole."""

    full_shape: tuple[int, ...]
    """Of the whole parameter, vocabulary padding included."""
    axis: int | None
    """None: every rank holds the whole."""
    pieces: int = 1
    """Into how many pieces `axis` is cut; below the TP size, neighbouring ranks share a piece (kv heads)."""
    tp: int = 1

    def piece_of(self, rank: int) -> int:
        return rank * self.pieces // self.tp

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, stop) along `axis`."""
        extent = self.full_shape[self.axis] // self.pieces
        return self.piece_of(rank) * extent, (self.piece_of(rank) + 1) * extent

    @property
    def shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.axis] //= self.pieces
        return tuple(shape)

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        if self.axis is None:
            return full
        start, stop = self.bounds(rank)
        return full.narrow(self.axis, start, stop - start)

    def merge(self, locals_by_rank: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.axis is None:
            return locals_by_rank[0]
        step = self.tp // self.pieces
        return torch.cat(list(locals_by_rank[::step]), dim=self.axis)


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a rollout tensor, under their training name."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class LayoutTensor:
    """One tensor as rollout holds it."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ActorLayout:
    """Rollout's tensors in slab order, the same for every rank, and the cut of each training parameter."""

    tp: int
    dtype: str
    size_bytes: int
    tensors: dict[str, LayoutTensor]
    shards: dict[str, Shard]

    @classmethod
    def build(cls, config: ModelConfig, tp: int, dtype: str) -> ActorLayout:
        if dtype not in ("float32", "float64", "bfloat16"):
            raise BadInput(f"weights of dtype {dtype!r}; supported are float32, float64, bfloat16")
        _check_divisible(config, tp)
        tensors: dict[str, LayoutTensor] = {}
        shards: dict[str, Shard] = {}
        end = 0
        for name, parts in _rollout_tensors(config, tp):
            rows = [shard.shape[0] for _, shard in parts]
            shape = (sum(rows), *parts[0][1].shape[1:])
            stops = [sum(rows[: index + 1]) for index in range(len(rows))]
            tensors[name] = LayoutTensor(
                align_up(end, ALIGNMENT_BYTES),
                shape,
                dtype,
                tuple(Part(part, stop - n, stop) for (part, _), stop, n in zip(parts, stops, rows)),
            )
            end = tensors[name].offset_bytes + tensors[name].size_bytes
            shards.update(parts)
        return cls(tp, dtype, align_up(end, ALIGNMENT_BYTES), tensors, shards)

    def placements(self, slab: str) -> dict[str, Placement]:
        """By rollout name."""
        return {
            name: Placement.contiguous(slab, tensor.offset_bytes, tensor.shape, tensor.dtype)
            for name, tensor in self.tensors.items()
        }

    def training_placements(self, slab: str) -> dict[str, Placement]:
        """The same bytes by training name."""
        return {
            part.name: placement.rows(part.start, part.stop)
            for name, placement in self.placements(slab).items()
            for part in self.tensors[name].parts
        }

    def views(self, slab_bytes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rollout's tensors inside a uint8 tensor over the slab."""
        dtype = getattr(torch, self.dtype)
        return {
            name: slab_bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].view(dtype).view(tensor.shape)
            for name, tensor in self.tensors.items()
        }

    def training_views(self, rollout_views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Row slices of rollout's tensors, by training name."""
        return {
            part.name: rollout_views[name][part.start : part.stop]
            for name, tensor in self.tensors.items()
            for part in tensor.parts
        }

    @cached_property
    def rollout_name_of(self) -> dict[str, str]:
        return {part.name: name for name, tensor in self.tensors.items() for part in tensor.parts}


def module_of(name: str) -> str:
    """Which part of the model a parameter belongs to, for learning rates and freezing; takes either name."""
    if name.startswith("visual.merger."):
        return "projector"
    return "vision" if name.startswith("visual.") else "decoder"


def _check_divisible(config: ModelConfig, tp: int) -> None:
    if tp < 1:
        raise BadInput(f"tensor-parallel size {tp} is below 1")
    for what, extent in (("attention heads", config.head_count), ("intermediate size", config.intermediate_size)):
        if extent % tp:
            raise BadInput(f"{extent} {what} are not divisible by a tensor-parallel size of {tp}")
    if config.kv_head_count % tp and tp % config.kv_head_count:
        raise BadInput(f"{config.kv_head_count} kv heads and a tensor-parallel size of {tp}: neither divides the other")


Parts = list[tuple[str, Shard]]


def _rollout_tensors(config: ModelConfig, tp: int) -> Iterator[tuple[str, Parts]]:
    """Rollout name -> the training parameters that it is made of, top to bottom."""
    for name, parts in _vision_tensors(config):
        yield name, [(part, Shard(shape, None, 1, tp)) for part, shape in parts]
    yield from _decoder_tensors(config, tp)


def _vision_tensors(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """The tower, whole on every rank."""
    vision = config.vision
    width, inner = vision.hidden_size, vision.intermediate_size
    merged = width * vision.spatial_merge_size**2
    patch = vision.patch_size

    def plain(name: str, *shape: int) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
        return name, [(name, shape)]

    yield plain("visual.patch_embed.proj.weight", width, vision.in_channels, vision.temporal_patch_size, patch, patch)
    for index in range(vision.depth):
        block = f"visual.blocks.{index}"
        yield plain(f"{block}.norm1.weight", width)
        yield plain(f"{block}.norm2.weight", width)
        yield plain(f"{block}.attn.qkv.weight", 3 * width, width)
        yield plain(f"{block}.attn.qkv.bias", 3 * width)
        yield plain(f"{block}.attn.proj.weight", width, width)
        yield plain(f"{block}.attn.proj.bias", width)
        for kind, shape in (("weight", (inner, width)), ("bias", (inner,))):
            parts = [(f"{block}.mlp.{half}_proj.{kind}", shape) for half in ("gate", "up")]
            yield f"{block}.mlp.gate_up_proj.{kind}", parts
        yield plain(f"{block}.mlp.down_proj.weight", width, inner)
        yield plain(f"{block}.mlp.down_proj.bias", width)
    yield plain("visual.merger.ln_q.weight", width)
    yield plain("visual.merger.mlp.0.weight", merged, merged)
    yield plain("visual.merger.mlp.0.bias", merged)
    yield plain("visual.merger.mlp.2.weight", vision.out_hidden_size, merged)
    yield plain("visual.merger.mlp.2.bias", vision.out_hidden_size)


def _decoder_tensors(config: ModelConfig, tp: int) -> Iterator[tuple[str, Parts]]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    heads, kv_heads, vocab = config.head_count, config.kv_head_count, config.padded_vocab(tp)

    def cut(axis: int | None, *shape: int, pieces: int = tp) -> Shard:
        return Shard(shape, axis, 1 if axis is None else pieces, tp)

    yield "language_model.model.embed_tokens.weight", [("language_model.embed_tokens.weight", cut(0, vocab, hidden))]
    for index in range(config.layer_count):
        rollout, training = f"language_model.model.layers.{index}", f"language_model.layers.{index}"
        yield f"{rollout}.input_layernorm.weight", [(f"{training}.input_layernorm.weight", cut(None, hidden))]
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            attention = f"{training}.self_attn"
            kv = cut(0, kv_heads * size, *tail, pieces=min(tp, kv_heads))
            yield (
                f"{rollout}.self_attn.qkv_proj.{kind}",
                [
                    (f"{attention}.q_proj.{kind}", cut(0, heads * size, *tail)),
                    (f"{attention}.k_proj.{kind}", kv),
                    (f"{attention}.v_proj.{kind}", kv),
                ],
            )
        name = "self_attn.o_proj.weight"
        yield f"{rollout}.{name}", [(f"{training}.{name}", cut(1, hidden, heads * size))]
        name = "post_attention_layernorm.weight"
        yield f"{rollout}.{name}", [(f"{training}.{name}", cut(None, hidden))]
        yield (
            f"{rollout}.mlp.gate_up_proj.weight",
            [(f"{training}.mlp.{half}_proj.weight", cut(0, inner, hidden)) for half in ("gate", "up")],
        )
        name = "mlp.down_proj.weight"
        yield f"{rollout}.{name}", [(f"{training}.{name}", cut(1, hidden, inner))]
    yield "language_model.model.norm.weight", [("language_model.norm.weight", cut(None, hidden))]
    if not config.tie_word_embeddings:
        yield "language_model.lm_head.weight", [("lm_head.weight", cut(0, vocab, hidden))]
