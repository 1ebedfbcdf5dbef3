"""Patches on their way to vLLM's workers: a memfd that each of them maps, and for vLLM a number a patch.

vLLM sends a request's media to its workers by pickle, with every sample's first step: 38 MB for a prompt of 4096 tokens, two or
three times a group. A worker reads them here once instead, when it computes their features. Legend: S patches, C numbers in one.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from rollplex.memory.host_driver import MEMFD_PREFIX, sealed_memfd

_ROW_BITS, _FD_BITS = 26, 20
"""Of a patch's number; the rest is the put's. Rows: a prompt of 2**26 patches would be 150 GB."""


def _name(serial: int) -> str:
    return f"patches-{serial}"


class SharedPatches:
    """The leader's. `put` and `drop` are the pair, by group. Owner thread only."""

    def __init__(self) -> None:
        self._fds: dict[int, list[int]] = defaultdict(list)
        self._serials = count()

    def put(self, group: int, patches: torch.Tensor) -> torch.Tensor:
        """int64 [S, 1] in place of `patches` [S, C], until the group is dropped. A slice of it stands for the same slice."""
        serial = next(self._serials) % (1 << 62 - _ROW_BITS - _FD_BITS)
        fd = sealed_memfd(_name(serial), patches.nbytes)
        self._fds[group].append(fd)
        with mmap.mmap(fd, patches.nbytes) as memory:
            torch.frombuffer(memory, dtype=patches.dtype).view(patches.shape).copy_(patches)
        return (torch.arange(len(patches)) + ((serial << _FD_BITS | fd) << _ROW_BITS))[:, None]

    def drop(self, groups: Collection[int] | None = None) -> None:
        """No number of these groups (None: of any) may be used any more. Idempotent."""
        for group in list(self._fds) if groups is None else groups:
            for fd in self._fds.pop(group, ()):
                os.close(fd)


@dataclass(frozen=True, slots=True)
class PatchReader:
    """A worker's, which is another process of the same user."""

    leader: int
    """Process that put the patches."""
    width: int
    """C."""
    dtype: torch.dtype
    device: torch.device

    def take(self, numbers_S1: torch.Tensor) -> torch.Tensor:
        """[S, C] on the device for int64 [S, 1], which may be of several puts. Raises OSError when they were dropped."""
        numbers = numbers_S1.flatten()
        patches = torch.empty(len(numbers), self.width, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        # Rows that follow each other lie in one memfd, one after the other.
        ends = torch.cat([torch.nonzero(numbers.diff() != 1).flatten() + 1, torch.tensor([len(numbers)])])
        start = 0
        for stop in ends.tolist():
            self._read(int(numbers[start]), patches[start:stop])
            start = stop
        return patches.to(self.device, non_blocking=True)

    def _read(self, number: int, out: torch.Tensor) -> None:
        row, fd, serial = number % (1 << _ROW_BITS), (number >> _ROW_BITS) % (1 << _FD_BITS), number >> _ROW_BITS + _FD_BITS
        with Path(f"/proc/{self.leader}/fd/{fd}").open("rb") as file:
            # A descriptor is given again once its file is closed.
            if not Path(f"/proc/self/fd/{file.fileno()}").readlink().name.startswith(f"memfd:{MEMFD_PREFIX}{_name(serial)} "):
                raise FileNotFoundError(errno.ENOENT, "these patches were dropped", file.name)
            # torch has no read-only tensors and would warn of a read-only buffer; nobody writes here.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with memory:
            first = row * self.width * self.dtype.itemsize
            out.copy_(torch.frombuffer(memory, dtype=self.dtype, count=out.numel(), offset=first).view(out.shape))
