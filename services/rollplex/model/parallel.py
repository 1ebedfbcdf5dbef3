"""Tensor-parallel process groups: torch.distributed plus Megatron-Core's parallel_state, one TP group a process."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rollplex.core.errors import BadInput


def init_tensor_parallel(
    rank: int,
    size: int,
    *,
    store: str | None = None,
    timeout_s: float = 600.0,
    device: torch.device | str = "cpu",
) -> None:
    """Join the TP group: NCCL when `device` is CUDA, else gloo. `store` is tcp://host:port or file:///path."""
    if not 0 <= rank < size:
        raise BadInput(f"tensor-parallel rank {rank} of {size}")
    timeout = timedelta(seconds=timeout_s)
    device = torch.device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # gloo listens on what the host name resolves to otherwise; a TP group never leaves its node.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=_open_store(store, rank, size, timeout), rank=rank, world_size=size, timeout=timeout)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def destroy_tensor_parallel() -> None:
    """Leave the group; init_tensor_parallel may be called again afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_parallel_group() -> dist.ProcessGroup:
    """The group that init_tensor_parallel made."""
    return parallel_state.get_tensor_model_parallel_group()


def _open_store(store: str | None, rank: int, size: int, timeout: timedelta) -> dist.Store:
    if store is None:
        if size != 1:
            raise BadInput(f"a tensor-parallel group of {size} needs a store (tcp://host:port or file:///path)")
        return dist.HashStore()
    address = urlparse(store)
    if address.scheme == "file":
        return dist.FileStore(address.path, size)
    if address.scheme == "tcp" and address.hostname and address.port:
        return dist.TCPStore(address.hostname, address.port, size, is_master=rank == 0, timeout=timeout)
    raise BadInput(f"store {store!r} is neither tcp://host:port nor file:///path")
