"""FP32 master weights and Adam moments of one rank in a slab: equal slots, one a chunk and three spare ones.

Slab: a header page, then the slots. A slot is [3, E]: master, first moment, second moment of one chunk's elements. Parameters
are flattened in layout order, trainable ones only. Legend: E elements of a slot, at least those of the largest chunk.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from rollplex.core.chunks import Chunk, split_chunks
from rollplex.core.errors import WrongState
from rollplex.core.placement import ITEM_BYTES, Placement, align_up
from rollplex.trainer.flip_log import PAGE_BYTES, FlipLog

SPARE_SLOTS = 3
"""A pipeline of load, compute and write-back has three chunks under way."""
_ALIGNMENT_ELEMENTS = 64
_MAGIC = b"RPXOPT01"
_HEADER = struct.Struct("<8sq32s")
"""magic, optimizer step, digest of the layout."""


@dataclass(frozen=True)
class StateLayout:
    """Where a rank's optimizer state is. The same parameters, chunk size and dtype give the same layout."""

    element_counts: tuple[tuple[str, int], ...]
    """(training name, elements on this rank) of the trainable parameters, in layout order."""
    chunk_elements: int
    dtype: str
    """Of master and moments: float32, or float64 for a float64 model."""
    other_elements: int = 0
    """Of gradients whose state other ranks have: this rank's groups have them, too, where replicas share groups out."""

    @cached_property
    def chunks(self) -> list[Chunk]:
        return split_chunks(self.element_counts, self.chunk_elements)

    @cached_property
    def chunk_starts(self) -> list[int]:
        """First element of each chunk in the flat order."""
        starts, total = [], 0
        for chunk in self.chunks:
            starts.append(total)
            total += chunk.element_count
        return starts

    @cached_property
    def spans_of(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """name -> (chunk, offset in the chunk, start, stop in the parameter)."""
        found: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name, _ in self.element_counts}
        for chunk in self.chunks:
            offset = 0
            for span in chunk.spans:
                found[span.name].append((chunk.index, offset, span.start, span.stop))
                offset += span.stop - span.start
        return found

    @property
    def element_count(self) -> int:
        return sum(count for _, count in self.element_counts)

    @property
    def slot_elements(self) -> int:
        return align_up(max((chunk.element_count for chunk in self.chunks), default=0), _ALIGNMENT_ELEMENTS)

    @property
    def slot_count(self) -> int:
        return len(self.chunks) + min(SPARE_SLOTS, len(self.chunks))

    @property
    def size_bytes(self) -> int:
        return PAGE_BYTES + self.slot_count * 3 * self.slot_elements * ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient slab: one flat buffer in the state's dtype."""
        return align_up(max(1, (self.element_count + self.other_elements) * ITEM_BYTES[self.dtype]), PAGE_BYTES)

    @cached_property
    def digest(self) -> bytes:
        text = json.dumps([self.element_counts, self.chunk_elements, self.dtype])
        return hashlib.sha256(text.encode()).digest()


class OptimizerState:
    """The slots, and which chunk is in which. `spare` and `flip` are the pair that moves a chunk."""

    def __init__(self, layout: StateLayout, slab: torch.Tensor, log: FlipLog, *, new: bool) -> None:
        """`slab`: uint8 [layout.size_bytes]; zero-filled when `new`, and nobody's state until `finish_step(0)`.

        Raises WrongState when an earlier process left it unfinished, or laid out for other parameters, chunks or dtype.
        """
        self.layout, self._log = layout, log
        self._header = slab[:_HEADER.size]
        magic, _, digest = self._read_header()
        if not new and (magic != _MAGIC or digest != layout.digest):
            raise WrongState("the optimizer state was never finished, or laid out for other trainable parameters, "
                             "chunk_elements or dtype; attach with the run's own configuration",
                             reason="STATE_LAYOUT_MISMATCH")
        shape = (layout.slot_count, 3, layout.slot_elements)
        place = Placement.contiguous("", PAGE_BYTES, shape, layout.dtype)
        flat = slab[PAGE_BYTES:PAGE_BYTES + place.size_bytes]
        self._slots = flat.view(getattr(torch, layout.dtype)).view(shape)
        used = {flip.slot for flip in log.flips}
        self._free = deque(slot for slot in range(layout.slot_count) if slot not in used)

    @property
    def optimizer_step(self) -> int:
        """Of the last update that went through."""
        return self._read_header()[1]

    def finish_step(self, optimizer_step: int) -> None:
        """All chunks are at this step; 0: the master weights are loaded."""
        packed = bytearray(_HEADER.pack(_MAGIC, optimizer_step, self.layout.digest))
        self._header.copy_(torch.frombuffer(packed, dtype=torch.uint8))

    @property
    def interrupted(self) -> bool:
        """Some chunk has been updated past the last finished step."""
        finished = self.optimizer_step
        return any(flip.optimizer_step > finished for flip in self._log.flips)

    def step_of(self, chunk: int) -> int:
        return self._log.flips[chunk].optimizer_step

    def current(self, chunk: int) -> torch.Tensor:
        """[3, elements of the chunk]: its valid master and moments."""
        return self._slots[self._log.flips[chunk].slot, :, :self.layout.chunks[chunk].element_count]

    def spare(self, chunk: int, ahead: int = 0) -> tuple[int, torch.Tensor]:
        """A free slot, and its part [3, elements] for this chunk. It stays free until `flip`; `ahead`: chunks that have got one
        and have not been flipped yet (they flip in the same order)."""
        slot = self._free[ahead]
        return slot, self._slots[slot, :, :self.layout.chunks[chunk].element_count]

    def flip(self, chunk: int, slot: int, optimizer_step: int) -> None:
        """Commits what was written to `slot`; the chunk's old slot becomes spare."""
        old = self._log.flips[chunk].slot
        self._log.record(chunk, slot, optimizer_step)
        self._free.remove(slot)
        self._free.append(old)

    def _read_header(self) -> tuple[bytes, int, bytes]:
        """Also of a slab that a GPU holds."""
        return _HEADER.unpack(self._header.cpu().numpy().tobytes())

    def set_master(self, name: str, values: torch.Tensor) -> None:
        """Writes a parameter's initial master weights, of its local shape, into the chunks that hold it."""
        self.set_row(0, name, values)

    def set_row(self, row: int, name: str, values: torch.Tensor) -> None:
        """As `set_master`, of a slot's row 0, 1 or 2: master, first or second moment."""
        flat = values.reshape(-1)
        for chunk, offset, start, stop in self.layout.spans_of[name]:
            self.current(chunk)[row, offset:offset + stop - start].copy_(flat[start:stop])

    def parts(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element in the parameter, its rows [3, elements]) of every chunk that holds some of it: views."""
        for chunk, offset, start, stop in self.layout.spans_of[name]:
            yield start, self.current(chunk)[:, offset:offset + stop - start]

    def restore_step(self, optimizer_step: int) -> None:
        """What was written into the slots is the state after that many updates."""
        for chunk, flip in enumerate(list(self._log.flips)):
            self._log.record(chunk, flip.slot, optimizer_step)
        self.finish_step(optimizer_step)

    def master(self, name: str) -> torch.Tensor:
        """A flat copy of a parameter's master weights."""
        parts = [self.current(chunk)[0, offset:offset + stop - start]
                 for chunk, offset, start, stop in self.layout.spans_of[name]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, self.layout.dtype))
