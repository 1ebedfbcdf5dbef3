"""Which slot holds the valid state of each chunk, in a slab that outlives the process.

A record is the only commit of a chunk's update (update-protocol.md, "Order inside UPDATE", 4). Each chunk has two cells; a
flip goes to the one that is not in force, so that a torn write leaves the record before it. The CRC covers the record only:
hashing the data would cost more than the update.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

from rollplex.core.errors import DataLoss
from rollplex.core.placement import align_up

_RECORD = struct.Struct("<QQII")
"""sequence, optimizer step, chunk, slot."""
_CELL_BYTES = 32
_CRC = struct.Struct("<I")
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Flip:
    sequence: int
    """Counts flips of the run; 0: the chunk was never updated."""
    optimizer_step: int
    chunk: int
    slot: int


def log_bytes(chunk_count: int) -> int:
    """Size of the slab."""
    return align_up(max(1, 2 * chunk_count * _CELL_BYTES), PAGE_BYTES)


class FlipLog:
    """The records over a uint8 tensor; zero bytes mean that chunk i is in slot i at step 0."""

    def __init__(self, slab: torch.Tensor, chunk_count: int) -> None:
        """Reads what is there. Raises DataLoss when two chunks claim one slot."""
        self._bytes = memoryview(slab.numpy())
        found = [self._read(chunk) for chunk in range(chunk_count)]
        self._cells = [cell for _, cell in found]
        self.flips = [flip for flip, _ in found]
        """In force, by chunk."""
        slots = [flip.slot for flip in self.flips]
        if len(set(slots)) != len(slots):
            raise DataLoss(f"the flip log gives one slot to two chunks: {slots}", reason="FLIP_LOG_BROKEN")
        self._sequence = max((flip.sequence for flip in self.flips), default=0)

    def record(self, chunk: int, slot: int, optimizer_step: int) -> None:
        """Commits: from here on the chunk is in `slot`, updated to `optimizer_step`."""
        flip = Flip(self._sequence + 1, optimizer_step, chunk, slot)
        cell = 1 - self._cells[chunk]
        body = _RECORD.pack(flip.sequence, flip.optimizer_step, flip.chunk, flip.slot)
        start = (2 * chunk + cell) * _CELL_BYTES
        self._bytes[start:start + _RECORD.size + _CRC.size] = body + _CRC.pack(zlib.crc32(body))
        self._cells[chunk], self.flips[chunk], self._sequence = cell, flip, flip.sequence

    def _read(self, chunk: int) -> tuple[Flip, int]:
        """The newest intact record of a chunk and its cell."""
        best, best_cell = Flip(0, 0, chunk, chunk), 1
        for cell in (0, 1):
            start = (2 * chunk + cell) * _CELL_BYTES
            body = bytes(self._bytes[start:start + _RECORD.size])
            (crc,) = _CRC.unpack(self._bytes[start + _RECORD.size:start + _RECORD.size + _CRC.size])
            flip = Flip(*_RECORD.unpack(body))
            if crc == zlib.crc32(body) and flip.chunk == chunk and flip.sequence > best.sequence:
                best, best_cell = flip, cell
        return best, best_cell
