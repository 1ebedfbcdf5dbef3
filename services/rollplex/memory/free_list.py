"""Which parts of a range are free: best fit, neighbours joined when freed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollplex.core.errors import OutOfMemory
from rollplex.core.placement import align_up

ALIGNMENT_BYTES = 64


@dataclass(slots=True)
class FreeList:
    """`allocate` and `free` are the pair. Sizes are rounded up to ALIGNMENT_BYTES."""

    size_bytes: int
    used_bytes: int = 0
    peak_bytes: int = 0
    holes: dict[int, int] = field(init=False)
    """Size by offset, in order of offsets."""
    taken: dict[int, int] = field(default_factory=dict)
    """Size by offset."""

    def __post_init__(self) -> None:
        self.size_bytes = self.size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.holes = {0: self.size_bytes} if self.size_bytes else {}

    def allocate(self, size_bytes: int) -> int:
        """An offset. Raises OutOfMemory with the numbers."""
        size = max(align_up(size_bytes, ALIGNMENT_BYTES), ALIGNMENT_BYTES)
        fitting = [(room, offset) for offset, room in self.holes.items() if room >= size]
        if not fitting:
            largest = max(self.holes.values(), default=0)
            raise OutOfMemory(f"{size:,} bytes do not fit the pool: {self.size_bytes - self.used_bytes:,} of "
                              f"{self.size_bytes:,} are free, the largest piece has {largest:,}",
                              reason="POOL_EXHAUSTED", size_bytes=size, used_bytes=self.used_bytes,
                              pool_bytes=self.size_bytes, largest_bytes=largest)
        room, offset = min(fitting)
        del self.holes[offset]
        if room > size:
            self._add_hole(offset + size, room - size)
        self.taken[offset] = size
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return offset

    def free(self, offset: int) -> None:
        """Raises ValueError for an offset that is not allocated."""
        if offset not in self.taken:
            raise ValueError(f"nothing is allocated at offset {offset}")
        size = self.taken.pop(offset)
        self.used_bytes -= size
        before = next((start for start, room in self.holes.items() if start + room == offset), None)
        if before is not None:
            size += self.holes.pop(before)
            offset = before
        size += self.holes.pop(offset + size, 0)
        self._add_hole(offset, size)

    def _add_hole(self, offset: int, size: int) -> None:
        self.holes[offset] = size
