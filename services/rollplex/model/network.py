"""The model: transformers' vision tower and our own decoder, whose ranks Megatron-Core's embedding and mappings join.

Parameter names are training names: HF's without the leading "model.". Parameters live wherever `bind` points them.
Legend: T tokens, D hidden, H query heads and K kv heads of this rank, d head size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rollplex.core.errors import BadInput
from rollplex.model.attention import Attend
from rollplex.model.config import ModelConfig
from rollplex.model.fused import silu_gate
from rollplex.model.layout import ActorLayout
from rollplex.model.megatron import (
    ModelParallelConfig,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from rollplex.model.parallel import Group, tensor_parallel_group
from rollplex.model.rotary import RMSNorm, Rope, RotaryTable, add_and_norm, rotate, rotate_both
from rollplex.model.tower_share import summed_over_ranks
from rollplex.model.vision import build_tower


class ColumnLinear(nn.Module):
    """This rank's rows of a matrix. In place of Megatron-Core's module, which computes the same products in an autograd function
    of its own: its Python was a quarter of what a suffix's layer cost the host, and an H200 had to wait for it (3B)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        """`outputs`: of this rank."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's columns of a matrix, for this rank's part of the input; the sum over ranks."""

    def __init__(self, inputs: int, outputs: int, group: Group, dtype: torch.dtype) -> None:
        """`inputs`: of this rank."""
        super().__init__()
        self.weight, self.tp_group = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype)), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, self.weight)
        return part if self.tp_group.size() == 1 else reduce_from_tensor_model_parallel_region(part, group=self.tp_group)


class Layers:
    """Builds layers for one rank; the input's gradient is reduced once per block, by `copy_in`."""

    def __init__(self, dtype: torch.dtype, group: Group) -> None:
        self.group = group
        self.size, self.rank = self.group.size(), self.group.rank()
        self.dtype = dtype
        self.config = ModelParallelConfig(
            tensor_model_parallel_size=self.size,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=dtype,
        )

    def column(self, inputs: int, outputs: int, *, bias: bool) -> ColumnLinear:
        return ColumnLinear(inputs, outputs // self.size, bias=bias, dtype=self.dtype)

    def row(self, inputs: int, outputs: int) -> RowLinear:
        return RowLinear(inputs // self.size, outputs, self.group, self.dtype)

    def copy_in(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else copy_to_tensor_model_parallel_region(x, group=self.group)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layers: Layers) -> None:
        super().__init__()
        self.size, self.copy_in = config.head_size, layers.copy_in
        queries = config.head_count * config.head_size
        # With fewer kv heads than ranks, neighbouring ranks hold the same head.
        keys = max(config.kv_head_count, layers.size) * config.head_size
        self.q_proj = layers.column(config.hidden_size, queries, bias=True)
        self.k_proj = layers.column(config.hidden_size, keys, bias=True)
        self.v_proj = layers.column(config.hidden_size, keys, bias=True)
        self.o_proj = layers.row(queries, config.hidden_size)

    def keys_values(self, x_TD: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """k (rotated), v [T, K, d] from an input that went through copy_in."""
        k, v = (proj(x_TD).unflatten(-1, (-1, self.size)) for proj in (self.k_proj, self.v_proj))
        return rotate(k, rope), v

    def forward(self, x_TD: torch.Tensor, rope: Rope, attend: Attend) -> tuple[torch.Tensor, ...]:
        x_TD = self.copy_in(x_TD)
        q, k, v_TKd = (proj(x_TD).unflatten(-1, (-1, self.size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q_THd, k_TKd = rotate_both(q, k, rope)
        out_TD = self.o_proj(attend(q_THd, k_TKd, v_TKd).flatten(1).contiguous())
        return out_TD, k_TKd, v_TKd


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, layers: Layers) -> None:
        super().__init__()
        self.copy_in = layers.copy_in
        self.gate_proj = layers.column(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = layers.column(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = layers.row(config.intermediate_size, config.hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.copy_in(x_TD)
        return self.down_proj(silu_gate(self.gate_proj(x_TD), self.up_proj(x_TD)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layers: Layers) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, layers.dtype)
        self.self_attn = SelfAttention(config, layers)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, layers.dtype)
        self.mlp = GatedMLP(config, layers)

    def keys_values(self, x_TD: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """All that a later token needs of this layer: k (rotated), v [T, K, d]."""
        return self.self_attn.keys_values(self.self_attn.copy_in(self.input_layernorm(x_TD)), rope)

    def forward(self, x_TD: torch.Tensor, rope: Rope, attend: Attend) -> tuple[torch.Tensor, ...]:
        """-> hidden [T, D], k, v [T, K, d]"""
        attended_TD, k_TKd, v_TKd = self.self_attn(self.input_layernorm(x_TD), rope, attend)
        norm = self.post_attention_layernorm
        x_TD, normed_TD = add_and_norm(x_TD, attended_TD, norm.weight, norm.eps)
        return x_TD + self.mlp(normed_TD), k_TKd, v_TKd


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, layers: Layers, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            vocab,
            config.hidden_size,
            init_method=None,
            config=layers.config,
            tp_group=layers.group,
        )
        self.layers = nn.ModuleList(DecoderLayer(config, layers) for _ in range(config.layer_count))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, layers.dtype)


class VisionLanguageModel(nn.Module):
    """One rank's model. Built on the meta device; `bind` gives it weights, which it never owns."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        layout: ActorLayout | None = None,
        group: Group | None = None,
    ) -> None:
        """One rank of `group` (the process's own when absent), which may be a Seat until `use_group`.

        `layout` is the actor's: its TP_train is the group's size in training, its TP_rollout in rollout. Absent: both are.
        """
        super().__init__()
        self.config, self.dtype = config, dtype
        self._layers = layers = Layers(dtype, group or tensor_parallel_group())
        self.tp_size, self.tp_rank, self.group = layers.size, layers.rank, layers.group
        self.layout = layout or ActorLayout.build(config, layers.size, str(dtype).removeprefix("torch."))
        self.shards = self.layout.shards_at(layers.size)
        """How this rank's parameters are cut from the whole."""
        vocab = self.shards["language_model.embed_tokens.weight"].full_shape[0]
        self.visual = build_tower(config.vision, dtype, device)
        with torch.device("meta"):
            self.language_model = Decoder(config, layers, vocab)
            if not config.tie_word_embeddings:
                self.lm_head = layers.column(config.hidden_size, vocab, bias=False)
        self.rotary = RotaryTable(config, device)

    def use_group(self, group: Group) -> None:
        """From now on collectives go through this group, of the same size and rank as the one before."""
        if (group.size(), group.rank()) != (self.tp_size, self.tp_rank):
            raise BadInput(f"rank {group.rank()} of {group.size()} for a model of rank {self.tp_rank} of {self.tp_size}")
        self.group = self._layers.group = group
        for module in self.modules():
            if hasattr(module, "tp_group"):
                module.tp_group = group

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, D]"""
        tied = self.config.tie_word_embeddings
        return self.language_model.embed_tokens.weight if tied else self.lm_head.weight

    def copy_in(self, x: torch.Tensor) -> torch.Tensor:
        """Identity whose gradient is summed over the TP ranks."""
        return self._layers.copy_in(x)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def bind(self, views: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter at its view; the set must be complete. May be called again to move the weights."""
        shapes = {name: shard.shape for name, shard in self.shards.items()}
        _check_views(shapes, views, self.dtype)
        for name, parameter in self.parameters_by_name().items():
            if tuple(parameter.shape) != shapes[name]:
                raise BadInput(f"layout and model disagree on {name}: {shapes[name]} and {tuple(parameter.shape)}")
            if parameter.is_meta:
                owner, _, leaf = name.rpartition(".")
                bound = nn.Parameter(views[name].detach(), requires_grad=parameter.requires_grad)
                setattr(self.get_submodule(owner), leaf, bound)
            else:
                parameter.data = views[name].detach()


def _check_views(shapes: dict[str, tuple[int, ...]], views: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    for what, names in (("no view for", shapes.keys() - views.keys()), ("unknown views", views.keys() - shapes.keys())):
        if names:
            raise BadInput(f"{what} {', '.join(sorted(names)[:5])} ({len(names)} in all)", reason="BAD_BINDING")
    for name, shape in shapes.items():
        if tuple(views[name].shape) != shape or views[name].dtype != dtype:
            raise BadInput(
                f"view of {name} is {views[name].dtype} {tuple(views[name].shape)}; expected {dtype} {shape}",
                reason="BAD_BINDING",
            )


def sum_replicated_gradients(model: VisionLanguageModel) -> None:
    """Add up the gradients of kv heads that several ranks hold, and of the tower, of which each has a part; call once, after the
    last backward of an update."""
    for name, parameter in model.parameters_by_name().items():
        shard = model.shards[name]
        if model.tp_size > 1 and summed_over_ranks(name) and parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=model.group)
            continue
        if shard.axis is None or not shard.replicated or not parameter.requires_grad:
            continue
        whole = torch.zeros(shard.full_shape, dtype=parameter.dtype, device=parameter.device)
        mine = shard.take(whole, model.tp_rank)
        if parameter.grad is not None:
            mine.copy_(parameter.grad)
        dist.all_reduce(whole, group=model.group)
        parameter.grad = mine.clone()
