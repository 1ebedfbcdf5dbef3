"""Patches on their way to vLLM's workers: a memfd that each of them maps, and for vLLM a ticket, a number a patch.

vLLM sends a request's media to its workers by pickle, with every sample's first step: 38 MB for a prompt of 4096 tokens, two or
three times a group. A worker reads them here once instead, when it computes their features. Legend: S patches, C numbers in one.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from rollplex.memory.host_driver import sealed_memfd

_ROW_BITS = 32


class SharedPatches:
    """The leader's. `put` and `drop` are the pair, by group. Owner thread only."""

    def __init__(self) -> None:
        self._fds: dict[int, list[int]] = defaultdict(list)

    def put(self, group: int, patches: torch.Tensor) -> torch.Tensor:
        """int64 [S, 1] in place of `patches` [S, C], until the group is dropped. A slice of it stands for the same slice."""
        fd = sealed_memfd("patches", patches.nbytes)
        self._fds[group].append(fd)
        with mmap.mmap(fd, patches.nbytes) as memory:
            torch.frombuffer(memory, dtype=patches.dtype).view(patches.shape).copy_(patches)
        return (torch.arange(len(patches)) + (fd << _ROW_BITS))[:, None]

    def drop(self, groups: Collection[int] | None = None) -> None:
        """No ticket of these groups (None: of any) may be used any more. Idempotent."""
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

    def take(self, ticket: torch.Tensor) -> torch.Tensor:
        """[S, C] on the device for int64 [S, 1], whose rows may be of several puts. Raises OSError when they were dropped."""
        numbers = ticket.flatten()
        patches = torch.empty(len(numbers), self.width, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        # Rows that follow each other lie in one memfd, one after the other.
        ends = torch.cat([torch.nonzero(numbers.diff() != 1).flatten() + 1, torch.tensor([len(numbers)])])
        start = 0
        for stop in ends.tolist():
            self._read(int(numbers[start]), patches[start:stop])
            start = stop
        return patches.to(self.device, non_blocking=True)

    def _read(self, number: int, out: torch.Tensor) -> None:
        fd, row = number >> _ROW_BITS, number & ((1 << _ROW_BITS) - 1)
        with Path(f"/proc/{self.leader}/fd/{fd}").open("rb") as file, mmap.mmap(
                # torch has no read-only tensors and would warn of a read-only buffer; nobody writes here.
                file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            first = row * self.width * self.dtype.itemsize
            out.copy_(torch.frombuffer(memory, dtype=self.dtype, count=out.numel(), offset=first).view(out.shape))
