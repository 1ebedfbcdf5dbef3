"""The host driver: reservations are PROT_NONE mappings, memory is a sealed memfd."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from rollplex.core.placement import align_up
from rollplex.memory.driver import Handle, Reservation

if TYPE_CHECKING:
    import torch

# From <bits/mman-linux.h>; Python's mmap module does not export them.
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
PROT_NONE = 0
MEMFD_PREFIX = "rollplex:"
"""Of the names that people see in /proc."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int = -1) -> int:
    result = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size_bytes} bytes: {os.strerror(number)}")
    return result


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A zero-filled memfd that can neither shrink nor grow; the caller closes it. Raises ValueError for sizes below 1."""
    if size_bytes < 1:
        raise ValueError(f"a slab of {size_bytes} bytes; it must have at least 1")
    fd = os.memfd_create(f"{MEMFD_PREFIX}{name}"[-200:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class HostDriver:
    """rollplex.memory.driver.Driver on host memory. Stateless: what it returns is all there is."""

    device = "host"
    granularity_bytes = mmap.PAGESIZE

    def reserve(self, size_bytes: int) -> Reservation:
        if size_bytes < 1:
            raise ValueError(f"a reservation of {size_bytes} bytes; it must have at least 1")
        size = align_up(size_bytes, self.granularity_bytes)
        return Reservation(_mmap(None, size, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), size)

    def free(self, reservation: Reservation) -> None:
        if _libc.munmap(reservation.address, reservation.size_bytes):
            number = ctypes.get_errno()
            raise OSError(number, f"munmap of {reservation.size_bytes} bytes: {os.strerror(number)}")

    def create(self, size_bytes: int, name: str) -> Handle:
        return Handle(sealed_memfd(name, size_bytes), size_bytes)

    def export(self, handle: Handle) -> int:
        return fcntl.fcntl(handle.number, fcntl.F_DUPFD_CLOEXEC, 0)

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        found = os.fstat(fd).st_size
        if found < size_bytes:
            raise ValueError(f"the file has {found} bytes, {size_bytes} were expected")
        return Handle(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), size_bytes)

    def map(self, reservation: Reservation, handle: Handle, *, writable: bool, offset_bytes: int = 0) -> None:
        size = self._window(reservation, offset_bytes, handle.size_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mmap(reservation.address + offset_bytes, size, protection, mmap.MAP_SHARED | MAP_FIXED, handle.number)

    def map_zeros(self, reservation: Reservation) -> None:
        # Reading anonymous memory that nobody has written maps the kernel's one zero page, again and again.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _mmap(reservation.address, reservation.size_bytes, mmap.PROT_READ, flags)

    def unmap(self, reservation: Reservation, *, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        wanted = reservation.size_bytes - offset_bytes if size_bytes is None else size_bytes
        size = self._window(reservation, offset_bytes, wanted)
        # A plain munmap would give the addresses to whoever maps next; an inaccessible mapping keeps them ours.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _mmap(reservation.address + offset_bytes, size, PROT_NONE, flags)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def release(self, handle: Handle) -> None:
        os.close(handle.number)

    def _window(self, reservation: Reservation, offset_bytes: int, size_bytes: int) -> int:
        """The size rounded up to pages. MAP_FIXED replaces whatever it covers, so nothing outside may be touched."""
        size = align_up(size_bytes, self.granularity_bytes)
        if offset_bytes < 0 or offset_bytes % self.granularity_bytes:
            raise ValueError(f"offset {offset_bytes} is no multiple of the granularity {self.granularity_bytes}")
        if size < 1 or offset_bytes + size > reservation.size_bytes:
            raise ValueError(f"{size} bytes at {offset_bytes} do not fit a reservation of {reservation.size_bytes}")
        return size
