"""How an engine cuts a matrix over its tensor-parallel ranks: logical (row, column) -> position in a rank's shard.

A tensor holds one logical parameter or several fused ones ([q; k; v], [gate; up]), cut along rows, along columns or not at
all. A bias is a matrix of one column. `runs` lists a shard's rows in storage order as runs of logical rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollplex.core.errors import BadInput
from rollplex.core.placement import align_up


class Axis(StrEnum):
    NONE = "none"
    """Every rank holds the whole."""
    ROWS = "rows"
    COLS = "cols"
    VOCAB = "vocab"
    """Rows, padded first so that they divide."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One logical parameter inside a tensor."""

    name: str
    rows: int
    """Of the whole parameter, without padding."""
    heads: int | None = None
    """The unit of the cut along rows; below the number of ranks, neighbouring ranks hold the same heads. None: rows."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive logical rows that follow each other in a shard."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One tensor of one engine. Raises BadInput where the cut does not divide."""

    parts: tuple[Fused, ...]
    cols: int
    tp: int
    axis: Axis = Axis.ROWS
    padded_rows: int | None = None
    """For VOCAB: rows after padding."""
    groups: int | None = None
    """Megatron's fused QKV: the whole tensor is this many kv groups, each [its queries; its key; its value]."""

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise _refused(f"tensor-parallel size {self.tp} is below 1", tp=self.tp)
        if not self.parts or self.cols < 1 or any(part.rows < 1 for part in self.parts):
            raise _refused(f"a tensor of {[(part.name, part.rows) for part in self.parts]} x {self.cols} holds nothing")
        if self.axis is Axis.COLS and self.cols % self.tp:
            raise _refused(f"{self.cols} columns of {self.names} are not divisible by TP {self.tp}", tp=self.tp)
        if self.axis in (Axis.ROWS, Axis.VOCAB):
            for part in self.parts:
                self._check_rows(part)
        if self.axis is Axis.VOCAB and len(self.parts) > 1:
            raise _refused(f"{self.names}: only one parameter may be cut along a padded vocabulary")
        if self.groups is not None:
            self._check_groups()

    def _check_rows(self, part: Fused) -> None:
        if part.heads is None:
            if self.whole_rows(part) % self.tp:
                raise _refused(f"{self.whole_rows(part)} rows of {part.name} are not divisible by TP {self.tp}", tp=self.tp)
        elif part.heads < 1 or part.rows % part.heads:
            raise _refused(f"{part.rows} rows of {part.name} are no {part.heads} equal heads")
        elif part.heads % self.tp and self.tp % part.heads:
            raise _refused(f"{part.heads} heads of {part.name} and TP {self.tp}: neither divides the other", tp=self.tp)

    def _check_groups(self) -> None:
        if self.axis is not Axis.ROWS:
            raise _refused(f"{self.names}: interleaved groups are cut along rows, not {self.axis.value}")
        for part in self.parts:
            if self._shard_rows(part) % self._local_groups:
                raise _refused(f"{self._shard_rows(part)} rows of {part.name} on a rank are not divisible into "
                               f"{self._local_groups} groups")

    @property
    def names(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def _local_groups(self) -> int:
        return max(1, (self.groups or 1) // self.tp)

    def whole_rows(self, part: Fused) -> int:
        """Padding included."""
        return self.padded_rows if self.axis is Axis.VOCAB and self.padded_rows else part.rows

    def _shard_rows(self, part: Fused) -> int:
        if self.axis in (Axis.NONE, Axis.COLS):
            return part.rows
        return self.whole_rows(part) // self.pieces(part)

    def pieces(self, part: Fused) -> int:
        """Into how many different shards the part's rows are cut."""
        if self.axis in (Axis.NONE, Axis.COLS):
            return 1
        return self.tp if part.heads is None else min(self.tp, part.heads)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a rank's shard."""
        return sum(map(self._shard_rows, self.parts)), self.columns(0)[1]

    def columns(self, rank: int) -> tuple[int, int]:
        """First logical column of a rank's shard, and how many."""
        if self.axis is not Axis.COLS:
            return 0, self.cols
        count = self.cols // self.tp
        return rank * count, count

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The shard's rows in storage order, neighbouring runs joined."""
        groups = self._local_groups if self.groups is not None else 1
        found: list[Run] = []
        for group in range(groups):
            for part in self.parts:
                rows = self._shard_rows(part)
                first = (rank * self.pieces(part) // self.tp) * rows
                found.append(Run(part.name, first + group * (rows // groups), rows // groups))
        return join(found)


def join(runs: list[Run]) -> tuple[Run, ...]:
    """Runs that continue the one before them become one."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.name == run.name and last.start + last.count == run.start:
            joined[-1] = Run(last.name, last.start, last.count + run.count)
        else:
            joined.append(run)
    return tuple(joined)


def padded_vocabulary(rows: int, alignment: int, tp: int) -> int:
    """Rows after padding to a multiple of both."""
    step = alignment
    while step % tp:
        step += alignment
    return align_up(rows, step)


def _refused(message: str, **numbers: object) -> BadInput:
    return BadInput(message, reason="BAD_LAYOUT", **numbers)
