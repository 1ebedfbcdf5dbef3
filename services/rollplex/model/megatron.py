"""What is used of Megatron-Core, imported without torch's compiler.

Importing megatron.core imports every fused function that it has, and each is decorated with torch.compile when its module is
imported. That alone loads torch's inductor, 1 s of CPU in every engine process that starts. None of these functions is used
here (the layers and mappings below have no compiled ones), so they are left as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _as_written(function: Callable | None = None, **_: Any) -> Callable:
    """In place of torch.compile: decorates nothing."""
    return _as_written if function is None else function


@contextmanager
def _without_compiler() -> Iterator[None]:
    compiled, torch.compile = torch.compile, _as_written
    try:
        yield
    finally:
        torch.compile = compiled


with _without_compiler():
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )

__all__ = [
    "ModelParallelConfig",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
]
