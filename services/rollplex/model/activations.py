"""What a block leaves in memory between its forward and its backward pass: three ways to run it, all exact."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Offload(Protocol):
    """Host storage for layer inputs between forward and backward; each handle is fetched once."""

    def put(self, tensor: torch.Tensor) -> Any: ...

    def get(self, handle: Any) -> torch.Tensor: ...


class HostCopies:
    """The default Offload: an ordinary host copy of each tensor."""

    def put(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
        return tensor.detach().to("cpu", copy=True), tensor.device

    def get(self, handle: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
        host, device = handle
        return host.to(device)


def run_plain(block, x: torch.Tensor, **arguments):
    """Every activation stays."""
    return block(x, **arguments)


def run_checkpointed(block, x: torch.Tensor, **arguments):
    """Only `x` stays; the block runs again in the backward pass. Tensors in `arguments` are held by reference."""
    if not torch.is_grad_enabled():
        return block(x, **arguments)
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, **arguments)


def run_offloaded(offload: Offload, run, block, x: torch.Tensor, **arguments):
    """As `run`, which checkpoints, with `x` in host storage."""

    def pack(tensor: torch.Tensor):
        keep = isinstance(tensor, nn.Parameter) or not tensor.numel()
        return (None, tensor) if keep else (offload, offload.put(tensor))

    def unpack(packed) -> torch.Tensor:
        owner, held = packed
        return held if owner is None else owner.get(held)

    with saved_tensors_hooks(pack, unpack):
        return run(block, x, **arguments)
