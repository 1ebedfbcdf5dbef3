"""Multimodal rotary embedding and the root-mean-square norm: the arithmetic that training and decoding share.

Legend: T tokens, D hidden, A heads of any kind, d head size, c = d / 2 channel pairs.
"""

from __future__ import annotations

import torch
from torch import nn

from rollplex.model.config import ModelConfig
from rollplex.model.fused import fused_on_cuda

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos, sin [T, 1, d] with the sign of `rotate` folded into sin."""


class RotaryTable:
    """Turns positions into the cosines and sines that rotate queries and keys."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        exponent = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self.inverse_frequency_c = (1.0 / (config.rope_theta**exponent)).to(device)
        axes = [axis % 3 for axis, pairs in enumerate(config.mrope_section) for _ in range(pairs)]
        self.axis_c = torch.tensor(axes, device=device)

    def __call__(self, positions_3T: torch.Tensor, dtype: torch.dtype) -> Rope:
        angles_Tc = positions_3T[self.axis_c].T.to(torch.float32) * self.inverse_frequency_c
        return _paired(angles_Tc, dtype)

    def text(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Rope:
        """The same where all three axes are equal."""
        return _paired(positions_T[:, None].to(torch.float32) * self.inverse_frequency_c, dtype)


def _paired(angles_Tc: torch.Tensor, dtype: torch.dtype) -> Rope:
    cos, sin = angles_Tc.cos(), angles_Tc.sin()
    cos_T1d = torch.cat((cos, cos), dim=-1).to(dtype)[:, None]
    sin_T1d = torch.cat((-sin, sin), dim=-1).to(dtype)[:, None]
    return cos_T1d, sin_T1d


def _rotated(x_TAd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x_TAd * cos + x_TAd.roll(x_TAd.shape[-1] // 2, dims=-1) * sin


_rotate = fused_on_cuda(_rotated)


@fused_on_cuda
def _rotate_both(q_TAd: torch.Tensor, k_TAd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(q_TAd, cos, sin), _rotated(k_TAd, cos, sin)


def rotate(x_TAd: torch.Tensor, rope: Rope) -> torch.Tensor:
    """[T, A, d] -> [T, A, d]"""
    return _rotate(x_TAd, *rope)


def rotate_both(q_TAd: torch.Tensor, k_TAd: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, as `rotate` each."""
    return _rotate_both(q_TAd, k_TAd, *rope)


def _normed(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Statistics in at least float32; the weight multiplies in the input's dtype, as the published model does."""
    wide = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(x_TD.dtype)


rms_norm = fused_on_cuda(_normed)


@fused_on_cuda
def add_and_norm(x_TD: torch.Tensor, more_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its rms_norm."""
    x_TD = x_TD + more_TD
    return x_TD, _normed(x_TD, weight_D, eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weight, self.eps)
