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
from rollplex.memory.host_registration import HostRegistration
from rollplex.memory.lease import SlabLease
from rollplex.memory.mapping import MappedSlab
from rollplex.memory.pool_stream import Fetch, PoolStream

POOL_CLASS = "pinned_pool"


class PoolTensor:
    """A tensor's bytes in the pool, until `free` or until the handle is garbage."""

    def __init__(self, pool: PinnedPool, view: torch.Tensor, size_bytes: int, offset: int, stream: PoolStream | None,
                 before: PoolTensor | None) -> None:
        self.size_bytes = size_bytes
        self._view = view
        self._pool, self._offset = pool, offset
        self._stream = stream
        """Of a tensor that came from a GPU."""
        self._before = None if before is None else weakref.ref(before)
        """Put just before: a backward pass wants it next."""
        self._fetch: Fetch | None = None
        self._finalizer = weakref.finalize(self, pool._garbage.append, offset)

    def free(self) -> None:
        """Idempotent."""
        if self._finalizer.detach():
            self._pool.free(self._offset)

    def _begin(self) -> None:
        """The bytes set out for the GPU, unless they have, came from none, or are gone."""
        if self._stream is not None and self._fetch is None and self._finalizer.alive:
            self._fetch = self._stream.fetch(self._view)

    def _copy(self) -> torch.Tensor:
        if self._stream is None:
            return self._view.clone(memory_format=torch.contiguous_format)
        self._begin()
        before = self._before() if self._before is not None else None
        if before is not None:
            before._begin()
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            raise WrongState("the tensor was freed", reason="POOL_FREED")
        return fetch.result()


class PinnedPool:
    """`put` and `free`, `allocate` and `free` are the pairs. Thread-safe."""

    def __init__(self, base: torch.Tensor) -> None:
        """`base`: uint8 [size], writable; registered, if a GPU's tensors are to come and go while it computes."""
        self._base = base
        self._free_list = FreeList(base.numel())
        self._lock = threading.Lock()
        # The garbage collector may run inside any of our own calls, lock held: it leaves the offsets here.
        self._garbage: deque[int] = deque()
        self._mapped: MappedSlab | None = None
        self._lease: SlabLease | None = None
        self._registration: HostRegistration | None = None
        self._delete = lambda: None
        self._streams: dict[torch.device, PoolStream] = {}
        self._last: weakref.ref[PoolTensor] | None = None
        self._closed = False

    @classmethod
    def create(cls, session: BrokerSession, name: str, size_bytes: int, *, run: str = "", registered: bool = False
               ) -> PinnedPool:
        """A pool in a slab of its own, which `close` deletes. A slab of that name left by a dead predecessor is replaced.
        `registered`: for a GPU. Raises OutOfMemory with the ledger's table, or when it cannot be pinned."""
        if any(slab.name == name for slab in session.list_slabs(name)):
            session.delete(name)
        session.create(name, object_class=POOL_CLASS, size_bytes=size_bytes, run=run)
        lease = session.lease(name, LeaseMode.WRITE)
        mapped = MappedSlab(driver_of("host"), size_bytes)
        try:
            mapped.bind(lease, writable=True)
        except BaseException:
            mapped.close()
            lease.release()
            raise
        pool = cls(mapped.tensor(Placement.contiguous(name, 0, (size_bytes,), "uint8")))
        pool._mapped, pool._lease, pool._delete = mapped, lease, lambda: session.delete(name)
        try:
            pool._registration = HostRegistration(mapped.address, size_bytes) if registered else None
        except BaseException:
            pool.close()
            raise
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
        """Copies the tensor into the pool, contiguous; from a GPU in stream order. Raises OutOfMemory with the numbers."""
        self._check_open()
        size = tensor.numel() * tensor.element_size()
        offset = self.allocate(size)
        dtype = str(tensor.dtype).removeprefix("torch.")
        view = views.tensor(self._base, Placement.contiguous("", offset, tuple(tensor.shape), dtype))
        stream = self._stream_of(tensor.device) if tensor.is_cuda else None
        if stream is None:
            view.copy_(tensor.detach())
        else:
            stream.send(tensor.detach(), view)
        handle = PoolTensor(self, view, size, offset, stream, self._last() if self._last is not None else None)
        self._last = weakref.ref(handle)
        return handle

    def get(self, handle: PoolTensor) -> torch.Tensor:
        """A fresh contiguous copy where the tensor was. On a GPU the one that was put before it sets out, too: backward passes
        go that way. Raises WrongState once the pool is closed."""
        self._check_open()
        return handle._copy()

    def _stream_of(self, device: torch.device) -> PoolStream:
        if device not in self._streams:
            self._streams[device] = PoolStream(device)
        return self._streams[device]

    def close(self) -> None:
        """Gives the slab back, if the pool made it. Handles are void afterwards. Idempotent."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()
        if self._registration is not None:
            self._registration.close()
        if self._mapped is None or self._lease is None:
            return
        self._mapped.close()
        self._lease.release()
        self._delete()
        self._mapped = self._lease = None

    def _check_open(self) -> None:
        if self._closed:
            raise WrongState("the pool is closed", reason="POOL_CLOSED")
