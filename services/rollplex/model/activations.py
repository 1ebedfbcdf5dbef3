"""What a block leaves in memory between its forward and its backward pass: three ways to run it, all exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

Limit = Callable[[], AbstractContextManager[Any]]
"""What is launched inside `with limit():` runs on fewer SMs, in order with what is outside."""


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


def run_plain(block, x: torch.Tensor, *, limit: Limit = nullcontext, **arguments):
    """Every activation stays. A graph that is left under the limit is also gone back through there."""
    with limit():
        return block(x, **arguments)


def run_checkpointed(block, x: torch.Tensor, *, limit: Limit = nullcontext, **arguments):
    """Only `x` stays; the block runs again in the backward pass, outside the limit. Tensors in `arguments` are held by reference.

    Not torch.utils.checkpoint's way, whose forward pass records a graph and calls hooks for every tensor in it, some 60 a block,
    with which the host falls behind a GPU: the forward pass leaves no graph at all.
    """
    trainable = x.requires_grad or any(p.requires_grad for p in getattr(block, "__self__", block).parameters())
    if not (torch.is_grad_enabled() and trainable):
        return run_plain(block, x, limit=limit, **arguments)
    # A node is only made for an input that takes a gradient, which x need not (parameters may).
    anchor = x.new_empty(0).requires_grad_()
    return _Checkpoint.apply(limit, block, arguments, anchor, x)


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


class _Checkpoint(torch.autograd.Function):
    """Autograd notes the stream that is current when `forward` has returned, so the node's backward runs outside the limit."""

    @staticmethod
    def forward(ctx, limit: Limit, block, arguments: dict[str, Any], anchor: torch.Tensor, x: torch.Tensor):
        ctx.block, ctx.arguments = block, arguments
        # Saved, and not kept beside: hooks for saved tensors (offloading, counting) are to see it.
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return run_plain(block, x, limit=limit, **arguments)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_(ctx.needs_input_grad[4])
        with torch.enable_grad():
            outputs = ctx.block(x, **ctx.arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                 if output.requires_grad and gradient is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))
        return None, None, None, None, x.grad
