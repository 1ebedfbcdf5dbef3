"""Every parameter of Qwen2.5-VL: rollout's tensors (vLLM's names and fusions) and the training parameters in each.

Legend: D hidden, I intermediate, H query heads, K kv heads, d head size, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.core.errors import BadInput
from rollplex.core.topology import Topology
from rollplex.model.config import ModelConfig
from rollplex.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Parameter:
    """One training parameter."""

    name: str
    full_shape: tuple[int, ...]
    axis: int | None = None
    """Which axis tensor parallelism cuts; None: every rank holds the whole."""
    units: int = 0
    """What the cut may not divide (kv heads): with more ranks than units, neighbours hold the same one. 0: none."""

    def shard(self, tp: int) -> Shard:
        pieces = 1 if self.axis is None else min(tp, self.units or tp)
        return Shard(self.full_shape, self.axis, pieces, tp)


Tensors = Iterator[tuple[str, list[Parameter]]]


def rollout_tensors(config: ModelConfig, topology: Topology) -> Tensors:
    """Rollout name -> the training parameters that it is made of, top to bottom. Raises BadInput for what does not divide."""
    _check_divisible(config, topology)
    yield from _vision_tensors(config)
    yield from _decoder_tensors(config, config.padded_vocab(topology.train_tp))


def module_of(name: str) -> str:
    """Which part of the model a parameter belongs to, for learning rates and freezing; takes either name."""
    if name.startswith("visual.merger."):
        return "projector"
    return "vision" if name.startswith("visual.") else "decoder"


def _check_divisible(config: ModelConfig, topology: Topology) -> None:
    for what, extent in (("attention heads", config.head_count), ("intermediate size", config.intermediate_size)):
        if extent % topology.train_tp:
            raise BadInput(f"{extent} {what} are not divisible by a tensor-parallel size of {topology.train_tp}",
                           reason="NOT_DIVISIBLE", extent=extent, tensor_parallel_size=topology.train_tp)
    kv_heads = config.kv_head_count
    for tp in (topology.train_tp, topology.rollout_tp):
        if kv_heads % tp and tp % kv_heads:
            raise BadInput(f"{kv_heads} kv heads and a tensor-parallel size of {tp}: neither divides the other",
                           reason="NOT_DIVISIBLE", extent=kv_heads, tensor_parallel_size=tp)


def _vision_tensors(config: ModelConfig) -> Tensors:
    """The tower, whole on every rank."""
    vision = config.vision
    width, inner = vision.hidden_size, vision.intermediate_size
    merged = width * vision.spatial_merge_size**2
    patch = vision.patch_size

    def plain(name: str, *shape: int) -> tuple[str, list[Parameter]]:
        return name, [Parameter(name, shape)]

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
            halves = [Parameter(f"{block}.mlp.{half}_proj.{kind}", shape) for half in ("gate", "up")]
            yield f"{block}.mlp.gate_up_proj.{kind}", halves
        yield plain(f"{block}.mlp.down_proj.weight", width, inner)
        yield plain(f"{block}.mlp.down_proj.bias", width)
    yield plain("visual.merger.ln_q.weight", width)
    yield plain("visual.merger.mlp.0.weight", merged, merged)
    yield plain("visual.merger.mlp.0.bias", merged)
    yield plain("visual.merger.mlp.2.weight", vision.out_hidden_size, merged)
    yield plain("visual.merger.mlp.2.bias", vision.out_hidden_size)


def _decoder_tensors(config: ModelConfig, vocab: int) -> Tensors:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    queries, keys = config.head_count * size, config.kv_head_count * size
    embedding = Parameter("language_model.embed_tokens.weight", (vocab, hidden), 0)
    yield "language_model.model.embed_tokens.weight", [embedding]
    for index in range(config.layer_count):
        rollout, training = f"language_model.model.layers.{index}", f"language_model.layers.{index}"
        yield _norm(rollout, training, "input_layernorm.weight", hidden)
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            attention = f"{training}.self_attn"
            yield f"{rollout}.self_attn.qkv_proj.{kind}", [
                Parameter(f"{attention}.q_proj.{kind}", (queries, *tail), 0),
                Parameter(f"{attention}.k_proj.{kind}", (keys, *tail), 0, config.kv_head_count),
                Parameter(f"{attention}.v_proj.{kind}", (keys, *tail), 0, config.kv_head_count),
            ]
        name = "self_attn.o_proj.weight"
        yield f"{rollout}.{name}", [Parameter(f"{training}.{name}", (hidden, queries), 1)]
        yield _norm(rollout, training, "post_attention_layernorm.weight", hidden)
        halves = [Parameter(f"{training}.mlp.{half}_proj.weight", (inner, hidden), 0) for half in ("gate", "up")]
        yield f"{rollout}.mlp.gate_up_proj.weight", halves
        name = "mlp.down_proj.weight"
        yield f"{rollout}.{name}", [Parameter(f"{training}.{name}", (hidden, inner), 1)]
    yield _norm("language_model.model", "language_model", "norm.weight", hidden)
    if not config.tie_word_embeddings:
        yield "language_model.lm_head.weight", [Parameter("lm_head.weight", (vocab, hidden), 0)]


def _norm(rollout: str, training: str, name: str, width: int) -> tuple[str, list[Parameter]]:
    return f"{rollout}.{name}", [Parameter(f"{training}.{name}", (width,))]
