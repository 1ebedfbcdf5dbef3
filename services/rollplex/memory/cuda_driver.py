"""The CUDA driver: virtual memory management of one GPU through cuda-bindings.

A slab is one allocation (cuMemCreate), so it is mapped by one call whatever its size. Memory is made on this driver's GPU and
may be used from the process's current one too (peer access), which is how a training rank writes its peers' slabs. Where the
current one does not reach it, torch copies by way of the host, and nothing else is different.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch
from cuda.bindings import driver as cu

from rollplex.core.placement import align_up
from rollplex.core.topology import torch_device
from rollplex.memory.driver import Handle, Reservation

_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ZEROS_BYTES = 64 << 20
"""Memory behind `map_zeros`: mapped again and again, so that a range of 15 GiB takes 240 calls and 64 MiB."""
_ERRNO = {cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY: errno.ENOMEM, cu.CUresult.CUDA_ERROR_INVALID_VALUE: errno.EINVAL,
          cu.CUresult.CUDA_ERROR_NOT_SUPPORTED: errno.ENOTSUP, cu.CUresult.CUDA_ERROR_NOT_PERMITTED: errno.EPERM}


class CudaDriver:
    """rollplex.memory.driver.Driver on one GPU. Thread-safe.

    A mapping that is not writable is read-only where CUDA has such mappings for device memory (`read_only_mappings`);
    otherwise readers are trusted. `unmap` and `free` wait for the GPU first: a kernel that still reads what is taken away
    would end the process.
    """

    def __init__(self, device: str) -> None:
        """`device`: the mesh's name. Makes torch's context on the GPU, if there is none yet. Raises OSError without such a GPU,
        BadInput (GPU_NOT_VISIBLE) for one that this process has not chosen to see."""
        ordinal = torch.device(torch_device(device)).index
        if not 0 <= ordinal < torch.cuda.device_count():
            raise OSError(errno.ENODEV, f"there is no GPU {ordinal}; CUDA shows {torch.cuda.device_count()}")
        self.device = device
        self._ordinal, self._lock = ordinal, threading.Lock()
        self.read_only_mappings = True
        """Until CUDA says otherwise."""
        self._extents: dict[int, dict[int, int]] = {}
        """Reservation's address -> what is mapped there, size by offset: an unmap must name whole mappings."""
        # torch makes and keeps the primary context, which every thread of the process then shares.
        torch.zeros(1, device=f"cuda:{ordinal}")
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = _location(ordinal)
        self._properties.requestedHandleTypes = _FD
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(_call(cu.cuMemGetAllocationGranularity, self._properties, minimum))

    def reserve(self, size_bytes: int) -> Reservation:
        if size_bytes < 1:
            raise ValueError(f"a reservation of {size_bytes} bytes; it must have at least 1")
        size = align_up(size_bytes, self.granularity_bytes)
        self._enter()
        address = int(_call(cu.cuMemAddressReserve, size, self.granularity_bytes, 0, 0))
        self._extents[address] = {}
        return Reservation(address, size)

    def free(self, reservation: Reservation) -> None:
        self.unmap(reservation)
        del self._extents[reservation.address]
        _call(cu.cuMemAddressFree, reservation.address, reservation.size_bytes)

    def create(self, size_bytes: int, name: str) -> Handle:
        if size_bytes < 1:
            raise ValueError(f"slab {name} of {size_bytes} bytes; it must have at least 1")
        self._enter()
        made = Handle(int(_call(cu.cuMemCreate, align_up(size_bytes, self.granularity_bytes), self._properties, 0)), size_bytes)
        try:
            self._fill_with_zeros(made)
        except BaseException:
            self.release(made)
            raise
        return made

    def export(self, handle: Handle) -> int:
        fd = int(_call(cu.cuMemExportToShareableHandle, handle.number, _FD, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        # CUDA does not tell an allocation's size; mapping one that is too small is refused.
        self._enter()
        return Handle(int(_call(cu.cuMemImportFromShareableHandle, fd, _FD)), size_bytes)

    def map(self, reservation: Reservation, handle: Handle, *, writable: bool, offset_bytes: int = 0) -> None:
        size = self._window(reservation, offset_bytes, handle.size_bytes)
        self.unmap(reservation, offset_bytes=offset_bytes, size_bytes=size)
        self._map(reservation, offset_bytes, size, handle)
        self._allow(reservation.address + offset_bytes, size, writable=writable)

    def map_zeros(self, reservation: Reservation) -> None:
        self.unmap(reservation)
        # An end of another size is memory of its own: cuMemMap takes an allocation whole or not at all.
        whole, rest = divmod(reservation.size_bytes, _ZEROS_BYTES)
        for first, size, count in ((0, _ZEROS_BYTES, whole), (whole * _ZEROS_BYTES, rest, 1)):
            if size and count:
                self._map_again_and_again(reservation, range(first, first + count * size, size), size)
        self._allow(reservation.address, reservation.size_bytes, writable=False)

    def unmap(self, reservation: Reservation, *, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        wanted = reservation.size_bytes - offset_bytes if size_bytes is None else size_bytes
        size = self._window(reservation, offset_bytes, wanted)
        with self._lock:
            extents = self._extents[reservation.address]
            stop = offset_bytes + size
            covered = [offset for offset, held in extents.items() if offset < stop and offset + held > offset_bytes]
            if not covered:
                return
            if any(offset < offset_bytes or offset + extents[offset] > stop for offset in covered):
                raise ValueError(f"{size} bytes at {offset_bytes} cut a mapping in two; the GPU unmaps whole ones only")
            self._enter()
            for ordinal in {self._ordinal, torch.cuda.current_device()}:
                torch.cuda.synchronize(ordinal)
            for offset in covered:
                _call(cu.cuMemUnmap, reservation.address + offset, extents.pop(offset))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        here = torch.cuda.current_device()
        if not all(_reaches(here, tensor.device.index) for tensor in (target, source)):
            target.copy_(source)
            return
        # torch has the source's GPU copy, and the target is mapped for its own and for this process's current one alone.
        self._enter()
        _call(cu.cuMemcpyDtoDAsync, target.data_ptr(), source.data_ptr(), target.nbytes, torch.cuda.current_stream().cuda_stream)

    def release(self, handle: Handle) -> None:
        _call(cu.cuMemRelease, handle.number)

    def _map_again_and_again(self, reservation: Reservation, offsets: range, size_bytes: int) -> None:
        zeros = self.create(size_bytes, "zeros")
        try:
            for offset in offsets:
                self._map(reservation, offset, size_bytes, zeros)
        finally:
            self.release(zeros)

    def _map(self, reservation: Reservation, offset_bytes: int, size_bytes: int, handle: Handle) -> None:
        self._enter()
        with self._lock:
            _call(cu.cuMemMap, reservation.address + offset_bytes, size_bytes, 0, handle.number, 0)
            self._extents[reservation.address][offset_bytes] = size_bytes

    def _allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """This GPU, and the process's current one if that is another that reaches it, may read, and write if `writable`."""
        current = torch.cuda.current_device()
        ordinals = {self._ordinal, *([current] if _reaches(current, self._ordinal) else ())}
        if not writable and self.read_only_mappings:
            try:
                _set_access(address, size_bytes, ordinals, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EINVAL):
                    raise
                self.read_only_mappings = False
            else:
                return
        _set_access(address, size_bytes, ordinals, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

    def _fill_with_zeros(self, handle: Handle) -> None:
        """CUDA leaves new memory undefined."""
        window = self.reserve(handle.size_bytes)
        try:
            # By the GPU that the memory is on: another one need not reach it.
            with torch.cuda.device(self._ordinal):
                self.map(window, handle, writable=True)
                _call(cu.cuMemsetD8, window.address, 0, window.size_bytes)
        finally:
            self.free(window)

    def _enter(self) -> None:
        """The calling thread uses torch's context."""
        if int(_call(cu.cuCtxGetCurrent)) == 0:
            torch.cuda.set_device(torch.cuda.current_device())
            torch.zeros(1, device=f"cuda:{torch.cuda.current_device()}")

    def _window(self, reservation: Reservation, offset_bytes: int, size_bytes: int) -> int:
        """The size rounded up to the granularity."""
        size = align_up(size_bytes, self.granularity_bytes)
        if offset_bytes < 0 or offset_bytes % self.granularity_bytes:
            raise ValueError(f"offset {offset_bytes} is no multiple of the granularity {self.granularity_bytes}")
        if size < 1 or offset_bytes + size > reservation.size_bytes:
            raise ValueError(f"{size} bytes at {offset_bytes} do not fit a reservation of {reservation.size_bytes}")
        return size


def _reaches(ordinal: int, other: int) -> bool:
    return ordinal == other or torch.cuda.can_device_access_peer(ordinal, other)


def _set_access(address: int, size_bytes: int, ordinals: Iterable[int], flags: cu.CUmemAccess_flags) -> None:
    accesses = []
    for ordinal in ordinals:
        access = cu.CUmemAccessDesc()
        access.location, access.flags = _location(ordinal), flags
        accesses.append(access)
    _call(cu.cuMemSetAccess, address, size_bytes, accesses, len(accesses))


def _location(ordinal: int) -> cu.CUmemLocation:
    location = cu.CUmemLocation()
    location.type, location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, ordinal
    return location


def _call(function: Any, *arguments: Any) -> Any:
    """The function's result. Raises OSError with CUDA's words."""
    status, *results = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(status)
        raise OSError(_ERRNO.get(status, errno.EIO), f"{function.__name__}: {status.name} ({(text or b'').decode()})")
    return results[0] if results else None
