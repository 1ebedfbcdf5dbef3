"""A process and the GPU that it computes on."""

from __future__ import annotations

import torch

from rollplex.core.topology import is_cuda

GIB = 1 << 30


def use_device(device: str, *, budget_gib: float = 0.0, share_gib: float = 0.0) -> None:
    """Makes `device` this process's own: torch's current one, float32 without TF32, its allocator bounded.

    The bound is a backstop: what is planned is checked by the broker. `share_gib` 0: the whole budget; that 0: the whole GPU.
    Slabs, pages behind fixed addresses and vLLM's pool are not the allocator's. A host device needs nothing.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if not is_cuda(device):
        return
    torch.cuda.set_device(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(allocator_fraction(total_bytes, budget_gib, share_gib), device)


def allocator_fraction(total_bytes: int, budget_gib: float, share_gib: float) -> float:
    """Of a GPU's memory, in (0, 1]."""
    limits = [gib * GIB / total_bytes for gib in (budget_gib, share_gib) if gib]
    return min([1.0, *limits])


def give_back_cache(device: str) -> None:
    """What torch's allocator keeps for later goes back to the driver: at barriers where a class leaves HBM."""
    if is_cuda(device):
        torch.cuda.empty_cache()
