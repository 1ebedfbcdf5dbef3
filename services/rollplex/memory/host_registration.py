"""Host memory that a GPU copies from and to at full speed: its pages exist, and CUDA has pinned them.

Faulting 8 GiB in takes over 4 s on one thread, which is most of what pinning costs (measured.md); several threads share it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from rollplex.core.errors import OutOfMemory

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; <asm-generic/mman-common.h>."""
_PIECE_BYTES = 256 << 20
_MOST_THREADS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, size_bytes: int) -> None:
    """Makes the pages of a writable mapping, contents untouched. `address`: page-aligned. Raises OutOfMemory without them."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    pieces = [(address + start, min(_PIECE_BYTES, size_bytes - start)) for start in range(0, size_bytes, _PIECE_BYTES)]
    with ThreadPoolExecutor(threads, thread_name_prefix="populate") as pool:
        list(pool.map(lambda piece: _populate(*piece), pieces))


class HostRegistration:
    """A mapping pinned for the GPU, from construction to `close`. The address range must stay mapped in between."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """`address`: page-aligned, writable. Without CUDA nothing is done: nobody would copy from there asynchronously.

        Raises OutOfMemory when the pages cannot be had or pinned.
        """
        self._address = 0
        if not torch.cuda.is_available():
            return
        populate(address, size_bytes)
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(address, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)
        if int(status):
            raise OutOfMemory(f"{size_bytes:,} bytes of host memory cannot be pinned: {runtime.cudaGetErrorString(status)}",
                              reason="HOST_PINNING_FAILED", size_bytes=size_bytes)
        self._address = address

    @property
    def active(self) -> bool:
        return self._address != 0

    def close(self) -> None:
        """Before the range is unmapped. Idempotent."""
        address, self._address = self._address, 0
        if address:
            # A copy that is still under way needs the pages.
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)


def _populate(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            # A Linux before 5.14: whoever pins the pages makes them, on one thread.
            return
        raise OutOfMemory(f"{size_bytes:,} bytes of host memory cannot be had: {os.strerror(number)}",
                          reason="OUT_OF_HOST_MEMORY", size_bytes=size_bytes)
