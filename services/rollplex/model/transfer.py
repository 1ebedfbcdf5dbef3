"""Small host tensors on their way to where the model is, without the host waiting for the device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor itself where it is already there. A pageable copy to a GPU would wait for all that is queued on the stream."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
