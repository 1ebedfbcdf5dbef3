"""One block of the vision tower on its own weights, computed as transformers computes it, in fewer and faster kernels.

Legend: S patches, W vision width, I intermediate width, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from rollplex.memory.transfer import to_device
from rollplex.model.decoder_block import Linear
from rollplex.model.fused import fused_on_cuda, silu_gate, unfused
from rollplex.model.rotary import rms_norm

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos, sin [S, d]."""
_ALIGNMENT = 64
"""Columns to which the intermediate width is filled up on a GPU: 3420 is no multiple of 16 bytes, and tensor cores wait."""


class Windows(NamedTuple):
    """Windows [offsets[i], offsets[i + 1]) of patches that see each other."""

    offsets: torch.Tensor
    """On the GPU as int32, where attention reads it; on the host otherwise."""
    longest: int
    """Known on the host, so that nothing waits for the device."""

    @classmethod
    def of(cls, offsets: torch.Tensor, device: torch.device) -> Windows:
        longest = int(offsets.diff().max())
        return cls(to_device(offsets.to(torch.int32), device) if device.type == "cuda" else offsets, longest)


class VisionBlock:
    """transformers' module with our arithmetic, to be run like a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._module.parameters()

    def __call__(self, x_SW: torch.Tensor, *, windows: Windows, rope: Rope) -> torch.Tensor:
        """[S, W] -> [S, W]"""
        block, attention, mlp = self._module, self._module.attn, self._module.mlp
        parts = _stretches(attention.num_heads, block.norm1.variance_epsilon)
        q, k, v = parts.queries_keys_values(x_SW, block.norm1.weight, _linear(attention.qkv), *rope)
        attended = window_attention(q, k, v, windows, attention.scaling)
        return parts.after_attention(x_SW, attended, _linear(attention.proj), block.norm2.weight,
                                     *map(_linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)))


def embed_patches(embedding: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """[S, C*T*p*p] -> [S, W]. The published convolution's stride is its kernel: it is a matrix."""
    return F.linear(pixels, embedding.proj.weight.flatten(1))


class Stretches(NamedTuple):
    """As the decoder's (decoder_block.py)."""

    queries_keys_values: Callable[..., tuple[torch.Tensor, ...]]
    """(x_SW, norm_W, qkv, cos_Sd, sin_Sd) -> q, k (rotated), v [S, h, d]"""
    after_attention: Callable[..., torch.Tensor]
    """(x_SW, attended_Shd, out, norm_W, gate, up, down) -> x_SW of the next block"""


@cache
def _stretches(heads: int, epsilon: float) -> Stretches:
    norm, gated = unfused(rms_norm), unfused(silu_gate)

    @fused_on_cuda
    def queries_keys_values(x_SW, norm_W, qkv, cos_Sd, sin_Sd):
        q, k, v = F.linear(norm(x_SW, norm_W, epsilon), *qkv).unflatten(-1, (3, heads, -1)).unbind(1)
        # In at least float32, as published.
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos_Sd[:, None].to(wide), sin_Sd[:, None].to(wide)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    @fused_on_cuda
    def after_attention(x_SW, attended_Shd, out, norm_W, gate, up, down):
        x_SW = x_SW + F.linear(attended_Shd.flatten(1), *out)
        y_SW = norm(x_SW, norm_W, epsilon)
        if missing := -gate[0].shape[0] % _ALIGNMENT if x_SW.is_cuda else 0:
            # Rows of zeros make columns of zeros, which the last matrix multiplies by zeros.
            gate, up = ((F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing))) for weight, bias in (gate, up))
            down = F.pad(down[0], (0, missing)), down[1]
        return x_SW + F.linear(gated(F.linear(y_SW, *gate), F.linear(y_SW, *up)), *down)

    return Stretches(queries_keys_values, after_attention)


def _linear(module: nn.Linear) -> Linear:
    return module.weight, module.bias


def _rotated(x_Shd: torch.Tensor, cos_S1d: torch.Tensor, sin_S1d: torch.Tensor) -> torch.Tensor:
    x = x_Shd.to(cos_S1d.dtype)
    first, second = x.chunk(2, -1)
    return (x * cos_S1d + torch.cat((-second, first), -1) * sin_S1d).to(x_Shd.dtype)


def window_attention(q_Shd: torch.Tensor, k_Shd: torch.Tensor, v_Shd: torch.Tensor, windows: Windows, scale: float
                     ) -> torch.Tensor:
    """[S, h, d], each window by itself."""
    if q_Shd.is_cuda and q_Shd.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        offsets, longest = windows
        packed = (x.contiguous() for x in (q_Shd, k_Shd, v_Shd))
        return varlen_attn(*packed, offsets, offsets, longest, longest, scale=scale)
    # float32 on a GPU is for tests: the offsets come back to the host.
    offsets = windows.offsets.cpu()
    lengths = offsets.diff()
    if bool((lengths == lengths[0]).all()):
        return _equal_windows(q_Shd, k_Shd, v_Shd, int(lengths[0]), scale)
    rows, outputs = [], []
    for length in lengths.unique().tolist():
        index = (offsets[:-1][lengths == length, None] + torch.arange(length)).reshape(-1)
        rows.append(index)
        outputs.append(_equal_windows(*(x[index.to(x.device)] for x in (q_Shd, k_Shd, v_Shd)), length, scale))
    return torch.cat(outputs)[torch.argsort(torch.cat(rows)).to(q_Shd.device)]


def _equal_windows(q_Shd: torch.Tensor, k_Shd: torch.Tensor, v_Shd: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """The windows as a batch."""
    batch = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_Shd, k_Shd, v_Shd))
    return F.scaled_dot_product_attention(*batch, scale=scale).transpose(1, 2).flatten(0, 1)
