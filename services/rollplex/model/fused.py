"""Elementwise arithmetic as one GPU kernel. Run an operation at a time, it is bound by memory and costs a third of a prefix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F

_MOST_VARIANTS = 64
"""Compiled forms of one function (widths, dtypes, with and without autograd); beyond, it runs unfused."""


def fused_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; compiled when its first argument is on a GPU. Sizes stay variable: a new prompt compiles nothing."""

    @wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        return (_compiled(function) if first.is_cuda else function)(first, *others)

    return call


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `fused_on_cuda` was given, to be a part of a larger one."""
    return function.__wrapped__


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    return torch.compile(function, dynamic=True)


@fused_on_cuda
def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up
