"""Batched decoding over shared boundaries, on the weights as rollout holds them (fused qkv_proj and gate_up_proj).

The N rows of a group read one copy of their prompt's keys and values; each row grows a suffix of its own. Every rank of a
tensor-parallel group calls `start` and `step` alike and gets the same logits: heads, inner width and vocabulary are split, the
output projections' partial sums are added up.
Legend: B rows, g groups of a lot, D hidden, H query and K kv heads of this rank, G = H / K, d head size, V padded vocabulary,
v its rows on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rollplex.core.errors import BadInput, WrongState
from rollplex.model.config import ModelConfig
from rollplex.model.decode_state import DecodeState, Lot, make_lots
from rollplex.model.inputs import PromptInputs
from rollplex.model.layout import ActorLayout
from rollplex.model.network import VisionLanguageModel
from rollplex.model.parallel import tensor_parallel_group
from rollplex.model.prefix import prefix_forward
from rollplex.model.rotary import Rope, rms_norm, rotate


@dataclass
class _LayerWeights:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class GroupDecoder:
    """Decodes with rollout's tensors themselves: an update in place shows at the next step."""

    def __init__(self, config: ModelConfig, layout: ActorLayout, rollout_views: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = dict(rollout_views)
        self.embedding = rollout_views["language_model.model.embed_tokens.weight"]
        self.head = self.embedding if config.tie_word_embeddings else rollout_views["language_model.lm_head.weight"]
        self.norm = rollout_views["language_model.model.norm.weight"]
        self.layers = [_layer_weights(rollout_views, index) for index in range(config.layer_count)]
        group = tensor_parallel_group()
        tp = group.size()
        if layout.tp != tp:
            raise BadInput(f"a layout of tensor-parallel size {layout.tp} in a group of {tp}", reason="BAD_BINDING")
        self.prefill = VisionLanguageModel(config, self.embedding.dtype, self.embedding.device, layout=layout, group=group)
        self.prefill.bind(layout.segment_views(rollout_views))
        self.prefill.requires_grad_(False)
        self.head_count, self.kv_head_count = config.head_count // tp, max(1, config.kv_head_count // tp)
        self._ranks = group if tp > 1 else None

    @torch.inference_mode()
    def start(self, groups: Iterable[tuple[PromptInputs, int]], max_new_tokens: int) -> DecodeState:
        """Prefill each prompt once; rows are group after group. Given an iterator, one prompt's pixels live at a time."""
        boundaries, first_tokens, first_positions = [], [], []
        device, dtype = self.embedding.device, self.embedding.dtype
        for inputs, n in groups:
            if n < 1:
                raise BadInput(f"group {len(boundaries)} has {n} rows; it needs at least 1")
            boundaries.append((prefix_forward(self.prefill, inputs.to(device)), n))
            first_tokens.append(inputs.last_token)
            first_positions.append(inputs.suffix_position)
        if not boundaries or max_new_tokens < 1:
            raise BadInput(f"{len(boundaries)} groups, {max_new_tokens} new tokens; both must be at least 1")
        counts = torch.tensor([n for _, n in boundaries])
        rows = int(counts.sum())
        shape = (rows, self.kv_head_count, max_new_tokens, self.config.head_size)

        def per_row(values: list[int]) -> torch.Tensor:
            return torch.tensor(values).repeat_interleave(counts).to(device)

        return DecodeState(
            lots=make_lots(boundaries),
            keys=[torch.empty(shape, dtype=dtype, device=device) for _ in self.layers],
            values=[torch.empty(shape, dtype=dtype, device=device) for _ in self.layers],
            first_tokens_B=per_row(first_tokens),
            first_positions_B=per_row(first_positions),
            capacity=max_new_tokens,
        )

    @torch.inference_mode()
    def step(self, state: DecodeState, tokens_B: torch.Tensor | None = None) -> torch.Tensor:
        """Feed one token a row (None at the first step: the last prompt token) -> logits [B, V], padding at -inf, on the weights'
        device; tokens may come from the host."""
        if state.step >= state.capacity:
            raise WrongState(f"all {state.capacity} tokens of this decode state are used")
        if (tokens_B is None) != (state.step == 0):
            raise WrongState(f"step {state.step}: tokens are given at every step but the first")
        tokens_B = state.first_tokens_B if tokens_B is None else tokens_B
        if tokens_B.shape != (state.row_count,):
            raise BadInput(f"{tuple(tokens_B.shape)} tokens for {state.row_count} rows")
        tokens_B = tokens_B.to(self.embedding.device)
        rope = self.prefill.rotary.text(state.first_positions_B + state.step, self.embedding.dtype)
        hidden_BD = self._embed(tokens_B)
        for index, layer in enumerate(self.layers):
            hidden_BD = self._layer(index, layer, hidden_BD, rope, state)
        logits_BV = self._whole(F.linear(rms_norm(hidden_BD, self.norm, self.config.rms_norm_eps), self.head))
        logits_BV[:, self.config.vocab_size :] = -torch.inf
        state.step += 1
        return logits_BV

    def _layer(self, index: int, weights: _LayerWeights, hidden_BD: torch.Tensor, rope: Rope, state: DecodeState) -> torch.Tensor:
        config, step = self.config, state.step
        heads, kv_heads = self.head_count, self.kv_head_count
        x_BD = rms_norm(hidden_BD, weights.input_norm, config.rms_norm_eps)
        qkv = F.linear(x_BD, weights.qkv, weights.qkv_bias).unflatten(-1, (-1, config.head_size))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        q, k = rotate(qk, rope).split((heads, kv_heads), dim=1)
        state.keys[index][:, :, step], state.values[index][:, :, step] = k, v
        attended = self._attend(index, q * config.head_size**-0.5, state)
        hidden_BD = self._add_product(hidden_BD, attended, weights.out)
        gate, up = F.linear(rms_norm(hidden_BD, weights.post_norm, config.rms_norm_eps), weights.gate_up).chunk(2, -1)
        return self._add_product(hidden_BD, F.silu(gate) * up, weights.down)

    def _attend(self, index: int, q_BHd: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """-> [B, H*d]; one softmax over [boundary; own suffix]."""
        rows, kv_heads, size, length = q_BHd.shape[0], self.kv_head_count, self.config.head_size, state.step + 1
        q = q_BHd.reshape(rows * kv_heads, -1, size)
        keys, values = (x[index][:, :, :length].reshape(rows * kv_heads, length, size) for x in (state.keys, state.values))
        own_scores = torch.bmm(q, keys.transpose(1, 2))
        outputs, own_weights = [], []
        for lot in state.lots:
            span = slice(lot.start * kv_heads, lot.stop * kv_heads)
            output, weights = _attend_lot(lot, index, q[span], own_scores[span], kv_heads)
            outputs.append(output)
            own_weights.append(weights)
        own = torch.bmm(_joined(own_weights), values)
        return (_joined(outputs) + own).reshape(rows, -1)

    def _embed(self, tokens_B: torch.Tensor) -> torch.Tensor:
        if self._ranks is None:
            return F.embedding(tokens_B, self.embedding)
        count = self.embedding.shape[0]
        row_B = tokens_B - self.prefill.tp_rank * count
        elsewhere_B = (row_B < 0) | (row_B >= count)
        hidden_BD = F.embedding(row_B.masked_fill_(elsewhere_B, 0), self.embedding).masked_fill_(elsewhere_B[:, None], 0)
        dist.all_reduce(hidden_BD, group=self._ranks)
        return hidden_BD

    def _add_product(self, hidden_BD: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden + x weight^T over all ranks' columns of the weight."""
        if self._ranks is None:
            return torch.addmm(hidden_BD, x, weight.T)
        product_BD = x @ weight.T
        dist.all_reduce(product_BD, group=self._ranks)
        return product_BD.add_(hidden_BD)

    def _whole(self, logits_Bv: torch.Tensor) -> torch.Tensor:
        """[B, V] from every rank's rows of the vocabulary."""
        if self._ranks is None:
            return logits_Bv
        parts = [torch.empty_like(logits_Bv) for _ in range(self._ranks.size())]
        dist.all_gather(parts, logits_Bv, group=self._ranks)
        return torch.cat(parts, dim=1)


def _attend_lot(
    lot: Lot, index: int, q: torch.Tensor, own_scores: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [g*n*K, G, d], own_scores [g*n*K, G, t] -> boundary's part of the output, as q; own weights, as own_scores."""
    size, group = q.shape[-1], q.shape[1]
    rows = (lot.stop - lot.start) // lot.groups

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        return x.view(lot.groups, rows, kv_heads, group, -1).transpose(1, 2).reshape(lot.groups, kv_heads, rows * group, -1)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(lot.groups, kv_heads, rows, group, -1).transpose(1, 2).reshape(-1, group, x.shape[-1])

    scores = torch.bmm(by_kv_head(q).flatten(0, 1), lot.keys[index]).unflatten(0, (lot.groups, kv_heads))
    if lot.padding is not None:
        scores = scores + lot.padding
    weights = torch.softmax(torch.cat((scores, by_kv_head(own_scores)), dim=-1), dim=-1)
    boundary = scores.shape[-1]
    output = torch.bmm(weights[..., :boundary].flatten(0, 1), lot.values[index])
    return by_row(output.view(lot.groups, kv_heads, rows * group, size)), by_row(weights[..., boundary:])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _layer_weights(views: Mapping[str, torch.Tensor], index: int) -> _LayerWeights:
    names = (
        "input_layernorm.weight",
        "self_attn.qkv_proj.weight",
        "self_attn.qkv_proj.bias",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
    )
    return _LayerWeights(*(views[f"language_model.model.layers.{index}.{name}"] for name in names))
