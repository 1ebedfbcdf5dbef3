"""The bound of a process's own allocator: a backstop behind the broker's checks."""

from __future__ import annotations

import torch

GIB = 1 << 30


def bound_allocator(device: torch.device, *, budget_gib: float, share_gib: float) -> None:
    """torch's allocator may take that much of a GPU and no more. 0: no bound of that kind.

    Slabs, pages behind fixed addresses and vLLM's pool are not the allocator's.
    """
    if device.type == "cuda" and (budget_gib or share_gib):
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_fraction(total_bytes, budget_gib, share_gib), device)


def allocator_fraction(total_bytes: int, budget_gib: float, share_gib: float) -> float:
    """Of a GPU's memory, in (0, 1]."""
    return min([1.0, *(gib * GIB / total_bytes for gib in (budget_gib, share_gib) if gib)])
