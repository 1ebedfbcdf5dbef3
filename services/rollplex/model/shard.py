"""How one rank's part of a parameter is cut from the whole, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    full_shape: tuple[int, ...]
    """Of the whole parameter, vocabulary padding included."""
    axis: int | None
    """None: every rank holds the whole."""
    pieces: int = 1
    """Into how many pieces `axis` is cut; below the TP size, neighbouring ranks share a piece (kv heads)."""
    tp: int = 1

    def piece_of(self, rank: int) -> int:
        return rank * self.pieces // self.tp

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, stop) along `axis`."""
        extent = self.full_shape[self.axis] // self.pieces
        return self.piece_of(rank) * extent, (self.piece_of(rank) + 1) * extent

    @property
    def shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.axis] //= self.pieces
        return tuple(shape)

    @property
    def replicated(self) -> bool:
        """Whether some ranks hold the same piece."""
        return self.pieces < self.tp

    def first_holder(self, rank: int) -> bool:
        """Whether this rank is the first that holds its piece: where it counts in sums over ranks."""
        return rank == 0 or (self.axis is not None and self.piece_of(rank) != self.piece_of(rank - 1))

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        if self.axis is None:
            return full
        start, stop = self.bounds(rank)
        return full.narrow(self.axis, start, stop - start)

    def merge(self, locals_by_rank: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.axis is None:
            return locals_by_rank[0]
        step = self.tp // self.pieces
        return torch.cat(list(locals_by_rank[::step]), dim=self.axis)
