"""Tensor-parallel process groups: torch.distributed's default group is the process's one TP group.

Megatron-Core's layers are given the group explicitly; its parallel_state, with a dozen groups of its own, is not needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from rollplex.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group that has not met yet: enough to build a model, which must `use_group` before it runs."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


Group = dist.ProcessGroup | Seat


def init_tensor_parallel(
    rank: int,
    size: int,
    *,
    store: str | dist.Store | None = None,
    timeout_s: float = 600.0,
    device: torch.device | str = "cpu",
) -> None:
    """Join the TP group: NCCL when `device` is CUDA, else gloo. `store` is a Store or file:///path."""
    if not 0 <= rank < size:
        raise BadInput(f"tensor-parallel rank {rank} of {size}")
    timeout = timedelta(seconds=timeout_s)
    device = torch.device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # gloo listens on what the host name resolves to otherwise; a TP group never leaves its node.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not isinstance(store, dist.Store):
        store = _open_store(store, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def destroy_tensor_parallel() -> None:
    """Leave the group; init_tensor_parallel may be called again afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_parallel_group() -> dist.ProcessGroup:
    """The group that init_tensor_parallel made."""
    return dist.group.WORLD


def _open_store(store: str | None, size: int) -> dist.Store:
    if store is None:
        if size != 1:
            raise BadInput(f"a tensor-parallel group of {size} needs a store (file:///path)")
        return dist.HashStore()
    address = urlparse(store)
    if address.scheme == "file":
        return dist.FileStore(address.path, size)
    # No TCPStore: it listens for everybody, and asks nobody who they are.
    raise BadInput(f"store {store!r} is no file:///path")
