"""Parameters in byte-balanced chunks: what the streamed update loads, computes and writes back together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of one flattened parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    spans: tuple[Span, ...]

    @property
    def element_count(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


def split_chunks(element_counts: Sequence[tuple[str, int]], chunk_elements: int) -> list[Chunk]:
    """Cuts the parameters, in order, into chunks of at most `chunk_elements`, equal to within one element.

    A large parameter spans several chunks, so the peak of an update does not depend on the largest tensor.
    """
    if chunk_elements < 1:
        raise ValueError(f"a chunk needs at least one element, not {chunk_elements}")
    total = sum(count for _, count in element_counts)
    if not total:
        return []
    chunk_count = -(-total // chunk_elements)
    bounds = [total * index // chunk_count for index in range(chunk_count + 1)]
    chunks: list[list[Span]] = [[] for _ in range(chunk_count)]
    base, chunk = 0, 0
    for name, count in element_counts:
        start = 0
        while start < count:
            while base + start >= bounds[chunk + 1]:
                chunk += 1
            stop = min(count, bounds[chunk + 1] - base)
            chunks[chunk].append(Span(name, start, stop))
            start = stop
        base += count
    return [Chunk(index, tuple(spans)) for index, spans in enumerate(chunks)]
