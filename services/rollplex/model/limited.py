"""Blocks of a prefix on a stream that may use a part of the device, and their backward pass on all of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Limit = Callable[[], AbstractContextManager[Any]]
"""What is launched inside `with limit():` runs on fewer SMs, in order with what is outside."""


def run_inside(limit: Limit, run, block, x: torch.Tensor, **arguments):
    """The block, as `run` runs it, under the limit. A graph that it leaves there is also gone back through there."""
    with limit():
        return run(block, x, **arguments)


def run_checkpointed_inside(limit: Limit, block, x: torch.Tensor, **arguments):
    """As activations.run_checkpointed, with the forward pass alone under the limit: its operations leave no graph, and the
    backward pass runs the block again, and back, outside."""
    trainable = x.requires_grad or any(p.requires_grad for p in getattr(block, "__self__", block).parameters())
    if not (torch.is_grad_enabled() and trainable):
        return run_inside(limit, _plain, block, x, **arguments)
    # A node is only made for an input that takes a gradient, which x need not (parameters may).
    anchor = x.new_empty(0).requires_grad_()
    return _Checkpoint.apply(limit, block, arguments, anchor, x)


def _plain(block, x: torch.Tensor, **arguments):
    return block(x, **arguments)


class _Checkpoint(torch.autograd.Function):
    """Autograd notes the stream that is current when `forward` has returned, so the node's backward runs outside the limit."""

    @staticmethod
    def forward(ctx, limit: Limit, block, arguments: dict[str, Any], anchor: torch.Tensor, x: torch.Tensor):
        ctx.block, ctx.arguments = block, arguments
        # Saved, and not kept beside: hooks for saved tensors (offloading, counting) are to see it.
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return run_inside(limit, _plain, block, x, **arguments)

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
