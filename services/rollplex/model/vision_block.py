"""One block of the vision tower on its own weights, computed as transformers computes it, in fewer and faster kernels.

Legend: S patches, W vision width, I intermediate width, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from rollplex.memory.transfer import to_device
from rollplex.model.fused import fused_on_cuda, silu_gate
from rollplex.model.rotary import add_and_norm, rms_norm

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
        block = self._module
        attended_SW = _attention(block.attn, rms_norm(x_SW, block.norm1.weight, block.norm1.variance_epsilon), windows, rope)
        x_SW, normed_SW = add_and_norm(x_SW, attended_SW, block.norm2.weight, block.norm2.variance_epsilon)
        return x_SW + _gated_mlp(block.mlp, normed_SW)


def embed_patches(embedding: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """[S, C*T*p*p] -> [S, W]. The published convolution's stride is its kernel: it is a matrix."""
    return F.linear(pixels, embedding.proj.weight.flatten(1))


def _attention(attention: nn.Module, x_SW: torch.Tensor, windows: Windows, rope: Rope) -> torch.Tensor:
    q, k, v = attention.qkv(x_SW).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    q, k = _rotate(q, k, *rope)
    return attention.proj(window_attention(q, k, v, windows, attention.scaling).flatten(1))


def _gated_mlp(mlp: nn.Module, x_SW: torch.Tensor) -> torch.Tensor:
    missing = -mlp.gate_proj.out_features % _ALIGNMENT if x_SW.is_cuda else 0
    if not missing:
        return mlp.down_proj(silu_gate(mlp.gate_proj(x_SW), mlp.up_proj(x_SW)))
    # Rows of zeros make columns of zeros, which the last matrix multiplies by zeros.
    gate, up = (F.linear(x_SW, F.pad(part.weight, (0, 0, 0, missing)), F.pad(part.bias, (0, missing)))
                for part in (mlp.gate_proj, mlp.up_proj))
    return F.linear(silu_gate(gate, up), F.pad(mlp.down_proj.weight, (0, missing)), mlp.down_proj.bias)


@fused_on_cuda
def _rotate(q_Shd: torch.Tensor, k_Shd: torch.Tensor, cos_Sd: torch.Tensor, sin_Sd: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """In at least float32, as published."""
    wide = torch.promote_types(q_Shd.dtype, torch.float32)
    cos, sin = cos_Sd[:, None].to(wide), sin_Sd[:, None].to(wide)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.to(wide).chunk(2, -1)
        return (x.to(wide) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    return rotated(q_Shd), rotated(k_Shd)


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
