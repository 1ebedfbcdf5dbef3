"""Small tensors on their way to a GPU, without the host waiting for it."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`. From host to GPU through pinned memory: the copy is ordered before the current stream's next work,
    and the host goes on; the source may be changed, or unmapped, as soon as this returns."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Contiguous first: pinned memory takes over strides, and cannot be written where they let elements overlap.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
