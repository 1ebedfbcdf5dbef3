"""The pinned pool: one host slab, allocated once, in which offloaded activations are parked."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.memory import views
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.free_list import FreeList
from rollplex.memory.lease import SlabLease
from rollplex.memory.mapping import MappedSlab

POOL_CLASS = "pinned_pool"


class PoolTensor:
    """A tensor's bytes in the pool, until `free` or until the handle is garbage."""

    def __init__(self, pool: PinnedPool, view: torch.Tensor, size_bytes: int, offset: int) -> None:
        self.size_bytes = size_bytes
        self._view = view
        self._pool, self._offset = pool, offset
        self._finalizer = weakref.finalize(self, pool._garbage.append, offset)

    def free(self) -> None:
        """Idempotent."""
        if self._finalizer.detach():
            self._pool.free(self._offset)


class PinnedPool:
    """`put` and `free`, `allocate` and `free` are the pairs. Thread-safe."""

    def __init__(self, base: torch.Tensor) -> None:
        """`base`: uint8 [size], writable."""
        self._base = base
        self._free_list = FreeList(base.numel())
        self._lock = threading.Lock()
        # The garbage collector may run inside any of our own calls, lock held: it leaves the offsets here.
        self._garbage: deque[int] = deque()
        self._mapped: MappedSlab | None = None
        self._lease: SlabLease | None = None
        self._delete = lambda: None
        self._closed = False

    @classmethod
    def create(cls, session: BrokerSession, name: str, size_bytes: int, *, run: str = "") -> PinnedPool:
        """A pool in a slab of its own, which `close` deletes. A slab of that name left by a dead predecessor is replaced.
        Raises OutOfMemory with the ledger's table."""
        if any(slab.name == name for slab in session.list_slabs(name)):
            session.delete(name)
        session.create(name, object_class=POOL_CLASS, size_bytes=size_bytes, run=run)
        lease = session.lease(name, LeaseMode.WRITE)
        mapped = MappedSlab(driver_of("host"), size_bytes)
        mapped.bind(lease, writable=True)
        pool = cls(mapped.tensor(Placement.contiguous(name, 0, (size_bytes,), "uint8")))
        pool._mapped, pool._lease, pool._delete = mapped, lease, lambda: session.delete(name)
        return pool

    @property
    def size_bytes(self) -> int:
        return self._free_list.size_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._free_garbage()
            return self._free_list.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._free_list.peak_bytes

    def allocate(self, size_bytes: int) -> int:
        """An offset, 64-byte aligned. Raises OutOfMemory with the numbers."""
        with self._lock:
            self._free_garbage()
            return self._free_list.allocate(size_bytes)

    def free(self, offset: int) -> None:
        with self._lock:
            self._free_list.free(offset)

    def _free_garbage(self) -> None:
        while self._garbage:
            self._free_list.free(self._garbage.popleft())

    def put(self, tensor: torch.Tensor) -> PoolTensor:
        """Copies the tensor into the pool, contiguous. Raises OutOfMemory with the numbers."""
        self._check_open()
        size = tensor.numel() * tensor.element_size()
        offset = self.allocate(size)
        dtype = str(tensor.dtype).removeprefix("torch.")
        view = views.tensor(self._base, Placement.contiguous("", offset, tuple(tensor.shape), dtype))
        view.copy_(tensor.detach())
        return PoolTensor(self, view, size, offset)

    def get(self, handle: PoolTensor) -> torch.Tensor:
        """A fresh contiguous copy. Raises WrongState once the pool is closed."""
        self._check_open()
        return handle._view.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Gives the slab back, if the pool made it. Handles are void afterwards. Idempotent."""
        self._closed = True
        if self._mapped is None or self._lease is None:
            return
        self._mapped.close()
        self._lease.release()
        self._delete()
        self._mapped = self._lease = None

    def _check_open(self) -> None:
        if self._closed:
            raise WrongState("the pool is closed", reason="POOL_CLOSED")
