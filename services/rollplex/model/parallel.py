"""Process groups: torch.distributed's default group is that of a role's ranks, which are one TP group or several (ranks.py).

Megatron-Core's layers are given the group explicitly; its parallel_state, with a dozen groups of its own, is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from rollplex.core.errors import BadInput

MAX_CTAS = 16
"""SMs that a group's collectives may take: roles share a GPU, and kernels that wait for a peer must leave room for others."""
_ENVIRONMENT = {
    # Both listen on what the host name resolves to otherwise; a TP group never leaves its node.
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    # Nothing is dumped for a collector that nobody runs.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


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
    asks_errors: bool = False,
) -> None:
    """Join the group of a role's ranks: NCCL when `device` is CUDA, which must have its number, else gloo. `store` is a Store or
    file:///path.

    A collective of NCCL past its deadline ends the process; of a caller that `asks_errors` (`group_error`, once the GPU has done
    what depends on collectives) the group alone, where torch can tell.
    """
    if not 0 <= rank < size:
        raise BadInput(f"tensor-parallel rank {rank} of {size}")
    timeout = timedelta(seconds=timeout_s)
    device = torch.device(device)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not isinstance(store, dist.Store):
        store = _open_store(store, size)
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        return
    torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2" if asks_errors and _tells_errors() else "1")
    # Named, so that ranks connect now and not in their first command.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device,
                            pg_options=_nccl_options(timeout))


def destroy_tensor_parallel() -> None:
    """Leave the group; init_tensor_parallel may be called again afterwards."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        # An orderly end waits for every collective that was begun, also for those that a lost rank never joins.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def group_error(group: dist.ProcessGroup) -> str:
    """What broke the group's collectives, as NCCL's watchdog found it: it raises nowhere by itself, and what was being received
    is then garbage. Empty while all is well; gloo raises where it happens."""
    if dist.get_backend(group) != "nccl" or not _tells_errors():
        return ""
    found = group._get_backend(torch.device("cuda")).get_error()
    return "" if "SUCCESS" in str(found) else str(found)


def _tells_errors() -> bool:
    """Not every build of torch shows Python what its watchdog has found."""
    return hasattr(dist.ProcessGroupNCCL, "get_error")


def _nccl_options(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = MAX_CTAS
    return options


def tensor_parallel_group() -> dist.ProcessGroup:
    """The group that init_tensor_parallel made."""
    return dist.group.WORLD


def sub_group(ranks: Sequence[int], timeout: timedelta, device: torch.device | str) -> dist.ProcessGroup:
    """Of some of the default group's ranks, all of which call this, with the same ranks."""
    options = _nccl_options(timeout) if torch.device(device).type == "cuda" else None
    return dist.new_group(list(ranks), timeout=timeout, pg_options=options)


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
