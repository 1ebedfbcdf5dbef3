"""A decoder layer of one rank as two fused stretches with attention between them.

An operation at a time a layer takes the host longer than a GPU: some thirty calls for a millisecond of work. With several ranks
the layer's collectives lie in between, and Megatron-Core's modules run it (network.py).
Legend: T tokens, D hidden, H query heads and K kv heads, d head size, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rollplex.model.fused import fused_on_cuda, silu_gate, unfused
from rollplex.model.rotary import rms_norm, rotate_by

Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out]."""


class Stretches(NamedTuple):
    keys_values: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(x_TD, norm_D, key, value, cos, sin) -> k (rotated), v [T, K, d]"""
    queries_keys_values: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(x_TD, norm_D, query, key, value, cos, sin) -> q (rotated) [T, H, d], k (rotated), v"""
    after_attention: Callable[..., torch.Tensor]
    """(x_TD, attended_THd, out_DX, norm_D, gate_ID, up_ID, down_DI) -> x_TD of the next layer"""


@cache
def stretches(head_size: int, epsilon: float) -> Stretches:
    """For every layer of that shape: the numbers are part of what is compiled."""
    norm, rotate, gated = unfused(rms_norm), unfused(rotate_by), unfused(silu_gate)

    def heads(x_TD: torch.Tensor, linear: Linear) -> torch.Tensor:
        return F.linear(x_TD, *linear).unflatten(-1, (-1, head_size))

    @fused_on_cuda
    def keys_values(x_TD, norm_D, key, value, cos, sin):
        x_TD = norm(x_TD, norm_D, epsilon)
        return rotate(heads(x_TD, key), cos, sin), heads(x_TD, value)

    @fused_on_cuda
    def queries_keys_values(x_TD, norm_D, query, key, value, cos, sin):
        x_TD = norm(x_TD, norm_D, epsilon)
        q, k, v = (heads(x_TD, linear) for linear in (query, key, value))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    @fused_on_cuda
    def after_attention(x_TD, attended_THd, out_DX, norm_D, gate_ID, up_ID, down_DI):
        x_TD = x_TD + F.linear(attended_THd.flatten(1), out_DX)
        y_TD = norm(x_TD, norm_D, epsilon)
        return x_TD + F.linear(gated(F.linear(y_TD, gate_ID), F.linear(y_TD, up_ID)), down_DI)

    return Stretches(keys_values, queries_keys_values, after_attention)
