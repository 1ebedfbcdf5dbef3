"""Whether training's shards can be views of rollout's shard, decided from the two index maps (training.md, section 4).

IDENTICAL    every training shard is whole rows of the rollout shard, in order: one run, or several equal runs at one stride,
             so that one strided view shows it
TRANSPOSED   the cut axis is the inner one and q > 1: rollout's shard is stored [columns, rows], so that every training shard is
             a contiguous slab of it; both engines see [rows, columns] through strides
INCOMPATIBLE anything else: training keeps storage of its own, rollout a buffer that is rebuilt after each update
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rollplex.core.errors import BadInput
from rollplex.core.placement import ITEM_BYTES, Placement
from rollplex.core.tensor_maps import Run, TensorMap
from rollplex.core.topology import Topology


class AliasCase(StrEnum):
    IDENTICAL = "identical"
    TRANSPOSED = "transposed"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class Share:
    """Where one training shard lies in rollout's shard."""

    first: int
    """Row of the rollout shard, or its column when TRANSPOSED."""
    runs: int
    count: int
    """Rows (columns) of each run."""
    stride: int
    """From the start of one run to the next."""
    owned: tuple[tuple[int, int], ...]
    """[start, stop) of the rows (columns) that this rank writes: of ranks that hold the same ones, the first does."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A rectangle of a training shard and where it goes in a rollout shard."""

    tensor: int
    """Index into the training tensors."""
    rank: int
    source_row: int
    source_col: int
    row: int
    col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Aliasing:
    """The verdict on one rollout tensor and the training tensors that make it up."""

    case: AliasCase
    topology: Topology
    rollout: TensorMap
    training: tuple[TensorMap, ...]
    shares: tuple[tuple[Share, ...], ...]
    """Of each training tensor, by training rank; empty when INCOMPATIBLE."""
    is_vector: bool = False
    """A bias or norm: placements have one axis."""

    @property
    def elements(self) -> int:
        """Of a rollout shard."""
        rows, cols = self.rollout.shape
        return rows * cols

    def rollout_placement(self, slab: str, offset_bytes: int, dtype: str) -> Placement:
        """Of every rank's shard (or rebuilt buffer), at `offset_bytes` of its slab."""
        rows, cols = self.rollout.shape
        if self.case is AliasCase.TRANSPOSED:
            return Placement(slab, offset_bytes, (rows, cols), (1, rows), dtype)
        return Placement.contiguous(slab, offset_bytes, (rows,) if self.is_vector else (rows, cols), dtype)

    def training_placement(self, tensor: int, rank: int, slab: str, offset_bytes: int, dtype: str) -> Placement:
        """Of a training shard, with rollout's shard at `offset_bytes`. Several runs are an axis of their own, in front."""
        if self.case is AliasCase.INCOMPATIBLE:
            raise BadInput(f"{self.rollout.names} is shared by no placement: it is rebuilt", reason="NOT_SHARED")
        share = self.shares[tensor][rank]
        rows, cols = self.rollout.shape
        item = ITEM_BYTES[dtype]
        if self.case is AliasCase.TRANSPOSED:
            return Placement(slab, offset_bytes + share.first * rows * item, (rows, share.count), (1, rows), dtype)
        shape, strides = ((share.count,), (1,)) if self.is_vector else ((share.count, cols), (cols, 1))
        if share.runs > 1:
            shape, strides = (share.runs, *shape), (share.stride * cols, *strides)
        return Placement(slab, offset_bytes + share.first * cols * item, shape, strides, dtype)

    def copies(self, rollout_rank: int) -> tuple[Copy, ...]:
        """What rebuilds a rollout shard from training shards, each element once; from the shard's own training ranks
        wherever they hold it. Padding that training does not have is left as it is."""
        return tuple(_copies(self.rollout, self.training, self.topology, rollout_rank))

    def row_permutation(self, rollout_rank: int) -> list[int]:
        """Rows of the rollout shard as indices into its q training shards, stacked rank after rank and, in a rank, tensor
        after tensor: rollout = stacked[permutation]. Raises BadInput where whole rows of those shards are not enough."""
        q = self.topology.q
        starts: dict[tuple[int, int], int] = {}
        total = 0
        for rank in range(rollout_rank * q, (rollout_rank + 1) * q):
            for tensor, item in enumerate(self.training):
                starts[rank, tensor] = total
                total += item.shape[0]
        rows, cols = self.rollout.shape
        order: list[int | None] = [None] * rows
        for copy in self.copies(rollout_rank):
            start = starts.get((copy.rank, copy.tensor))
            if start is None or copy.cols != cols or cols != self.training[copy.tensor].shape[1]:
                raise BadInput(f"{self.rollout.names} is no permutation of whole rows; use copies", reason="NO_PERMUTATION")
            for index in range(copy.rows):
                order[copy.row + index] = start + copy.source_row + index
        if None in order:
            raise BadInput(f"{self.rollout.names} has rows that training does not hold", reason="NO_PERMUTATION")
        return order


def classify(rollout: TensorMap, training: Sequence[TensorMap], *, is_vector: bool = False) -> Aliasing:
    """Raises BadInput unless q is a positive integer and both engines speak of the same parameters."""
    topology = Topology(_one_tp(training), rollout.tp)
    _check_same_parameters(rollout, training)
    training = tuple(training)
    for case, find in ((AliasCase.IDENTICAL, _row_shares), (AliasCase.TRANSPOSED, _column_shares)):
        shares = find(rollout, training, topology)
        if shares is not None:
            return Aliasing(case, topology, rollout, training, shares, is_vector)
    return Aliasing(AliasCase.INCOMPATIBLE, topology, rollout, training, (), is_vector)


def _one_tp(training: Sequence[TensorMap]) -> int:
    degrees = {item.tp for item in training}
    if len(degrees) != 1:
        raise BadInput(f"training tensors of {len(degrees)} tensor-parallel sizes: {sorted(degrees)}", reason="BAD_LAYOUT")
    return degrees.pop()


def _check_same_parameters(rollout: TensorMap, training: Sequence[TensorMap]) -> None:
    theirs = {part.name: (part.rows, rollout.cols) for part in rollout.parts}
    ours = {part.name: (part.rows, item.cols) for item in training for part in item.parts}
    if theirs != ours or sum(len(item.parts) for item in training) != len(theirs):
        raise BadInput(f"rollout holds {theirs} and training {ours} (rows, columns): not the same parameters",
                       reason="BAD_LAYOUT")


Shares = tuple[tuple[Share, ...], ...]


def _row_shares(rollout: TensorMap, training: tuple[TensorMap, ...], topology: Topology) -> Shares | None:
    """None unless every training shard is equal runs of whole rows of its rollout shard, and together they cover it."""
    found: list[list[Share]] = [[] for _ in training]
    for shard in range(topology.rollout_tp):
        rows = _rows_by_name(rollout.runs(shard))
        unwritten = [(0, rollout.shape[0], 0, 1)]
        for rank in range(shard * topology.q, (shard + 1) * topology.q):
            for tensor, item in enumerate(training):
                pieces = _pieces(rows, item.runs(rank)) if item.columns(rank) == rollout.columns(shard) else None
                share = _strided(pieces) if pieces else None
                if share is None:
                    return None
                owned = [box[:2] for start, count in pieces for box in _take(unwritten, (start, start + count, 0, 1))]
                found[tensor].append(replace(share, owned=tuple(owned)))
        if unwritten:
            return None
    return tuple(map(tuple, found))


RowsByName = dict[str, list[tuple[int, int, int]]]
"""(first logical row, count, row of the shard), by logical row."""


def _rows_by_name(runs: tuple[Run, ...]) -> RowsByName:
    found: RowsByName = {}
    row = 0
    for run in runs:
        found.setdefault(run.name, []).append((run.start, run.count, row))
        row += run.count
    return {name: sorted(items) for name, items in found.items()}


def _pieces(rows: RowsByName, runs: tuple[Run, ...]) -> list[tuple[int, int]] | None:
    """Where a training shard's rows are in the rollout shard, as (row, count); None where some are not there."""
    pieces: list[tuple[int, int]] = []
    for run in runs:
        at = run.start
        for start, count, row in rows[run.name]:
            if start <= at < min(start + count, run.start + run.count):
                stop = min(start + count, run.start + run.count)
                where = row + at - start
                if pieces and sum(pieces[-1]) == where:
                    where, before = pieces.pop()
                    pieces.append((where, before + stop - at))
                else:
                    pieces.append((where, stop - at))
                at = stop
        if at != run.start + run.count:
            return None
    return pieces


def _strided(pieces: list[tuple[int, int]]) -> Share | None:
    """Equal runs, in order, at one stride."""
    first, count = pieces[0]
    stride = pieces[1][0] - first if len(pieces) > 1 else count
    if stride < count or any(piece != (first + index * stride, count) for index, piece in enumerate(pieces)):
        return None
    return Share(first, len(pieces), count, stride, ())


def _column_shares(rollout: TensorMap, training: tuple[TensorMap, ...], topology: Topology) -> Shares | None:
    """None unless the q training shards are all rows, in rollout's order, of neighbouring columns of their rollout shard."""
    if len(training) != 1:
        return None
    shares = []
    for rank in range(topology.train_tp):
        shard = topology.rollout_shard(rank)
        (first, width), (begin, count) = rollout.columns(shard), training[0].columns(rank)
        place = topology.part(rank) * count
        if training[0].runs(rank) != rollout.runs(shard) or begin != first + place or count * topology.q != width:
            return None
        shares.append(Share(place, 1, count, count, ((place, place + count),)))
    return (tuple(shares),)


def _copies(rollout: TensorMap, training: tuple[TensorMap, ...], topology: Topology, shard: int) -> Iterator[Copy]:
    first, width = rollout.columns(shard)
    own = range(shard * topology.q, (shard + 1) * topology.q)
    ranks = [*own, *(rank for rank in range(topology.train_tp) if rank not in own)]
    row = 0
    for run in rollout.runs(shard):
        tensor = next(index for index, item in enumerate(training) if run.name in (part.name for part in item.parts))
        missing = [(run.start, run.start + run.count, first, first + width)]
        for rank in ranks:
            begin, count = training[tensor].columns(rank)
            source = 0
            for held in training[tensor].runs(rank):
                if held.name == run.name:
                    box = (held.start, held.start + held.count, begin, begin + count)
                    for top, bottom, left, right in _take(missing, box):
                        yield Copy(tensor, rank, source + top - held.start, left - begin, row + top - run.start,
                                   left - first, bottom - top, right - left)
                source += held.count
        row += run.count


Box = tuple[int, int, int, int]
"""Rows [0, 1) and columns [2, 3)."""


def _take(missing: list[Box], box: Box) -> list[Box]:
    """Removes from `missing` what `box` covers, and returns that. A cut along one axis leaves the other whole."""
    taken, left = [], []
    for top, bottom, west, east in missing:
        high, low, near, far = max(top, box[0]), min(bottom, box[1]), max(west, box[2]), min(east, box[3])
        if high >= low or near >= far:
            left.append((top, bottom, west, east))
            continue
        taken.append((high, low, near, far))
        rest = [(top, high, west, east), (low, bottom, west, east), (high, low, west, near), (high, low, far, east)]
        left += [piece for piece in rest if piece[0] < piece[1] and piece[2] < piece[3]]
    missing[:] = left
    return taken
