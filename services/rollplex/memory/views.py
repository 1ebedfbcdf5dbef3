"""Tensors over mapped memory: a uint8 base over the address range, then dtype, shape and strides of the placement."""

from __future__ import annotations

import ctypes

import torch

from rollplex.core.placement import ITEM_BYTES, Placement

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


def base_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes] over host memory at `address`; reads nothing, owns nothing."""
    window = (ctypes.c_char * size_bytes).from_address(address)
    return torch.frombuffer(window, dtype=torch.uint8)


def tensor(base: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The placement's tensor inside `base`. Raises ValueError when it reaches past the end."""
    if placement.end_bytes > base.numel():
        raise ValueError(f"placement ends at byte {placement.end_bytes} of slab {placement.slab}, "
                         f"which has {base.numel()} bytes")
    item = ITEM_BYTES[placement.dtype]
    whole = base[: base.numel() // item * item].view(DTYPES[placement.dtype])
    return whole.as_strided(placement.shape, placement.strides, placement.offset_bytes // item)
