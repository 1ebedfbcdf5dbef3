"""Bytes that autograd keeps for a backward pass, counted while the forward pass saves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Every storage once; those of `known` tensors (weights, which somebody else accounts for) not at all."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.size_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is saved inside. Hooks set further in (offload, checkpointing) keep their own tensors to themselves."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.size_bytes += storage.nbytes()
        # Handing back a node's own output would close a reference cycle that nothing collects.
        return tensor if tensor.is_leaf else tensor.detach()
