"""What decoding a batch keeps between steps: prompts' keys and values once a group, and each row's own suffix.

Groups alike in N and boundary length form a lot, whose boundaries are stacked: attention is a few operations a lot.
Legend: B rows, g groups of a lot, n rows a group, K kv heads of this rank, d head size, P boundary tokens, R response capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from rollplex.model.boundary import Boundary


@dataclass
class Lot:
    """Consecutive groups with the same number of rows and boundaries of similar length."""

    start: int
    stop: int
    """Rows [start, stop) of the batch."""
    groups: int
    keys: list[torch.Tensor]
    """Per layer [g*K, d, P], ready for the score product."""
    values: list[torch.Tensor]
    """Per layer [g*K, P, d]"""
    padding: torch.Tensor | None
    """Additive [g, 1, 1, P], where boundaries are shorter than the longest."""


@dataclass
class DecodeState:
    """What decoding a batch needs between steps; `release` drops it."""

    lots: list[Lot]
    keys: list[torch.Tensor]
    """Per layer [B, K, R, d], a row's own suffix."""
    values: list[torch.Tensor]
    first_tokens_B: torch.Tensor
    first_positions_B: torch.Tensor
    capacity: int
    step: int = 0

    @property
    def row_count(self) -> int:
        return self.first_tokens_B.shape[0]

    @property
    def size_bytes(self) -> int:
        """Boundaries and suffixes together."""
        tensors = [*self.keys, *self.values, *(x for lot in self.lots for x in (*lot.keys, *lot.values))]
        return sum(x.numel() * x.element_size() for x in tensors)

    def release(self) -> None:
        self.lots, self.keys, self.values, self.capacity = [], [], [], 0

    @torch.inference_mode()
    def keep_groups(self, kept: Sequence[bool]) -> torch.Tensor:
        """Drops the groups whose flag (one a group, in order) is False, rows and keys and all. At least one stays.

        Returns the kept rows' old numbers, on the host.
        """
        kv_heads = self.keys[0].shape[1]
        lots, rows, group = [], [], 0
        for lot in self.lots:
            flags = torch.tensor(kept[group : group + lot.groups])
            group += lot.groups
            old_rows = torch.arange(lot.start, lot.stop).view(lot.groups, -1)[flags].flatten()
            if len(old_rows):
                lots.append(_kept_lot(lot, flags, kv_heads, start=sum(map(len, rows)), row_count=len(old_rows)))
                rows.append(old_rows)
        kept_rows = torch.cat(rows)
        index_B = kept_rows.to(self.first_tokens_B.device)
        for halves in (self.keys, self.values):
            for layer, old_BKRd in enumerate(halves):
                new = old_BKRd.new_empty(len(index_B), *old_BKRd.shape[1:])
                new[:, :, : self.step] = old_BKRd[:, :, : self.step].index_select(0, index_B)
                halves[layer] = new
        self.lots = lots
        self.first_tokens_B = self.first_tokens_B[index_B]
        self.first_positions_B = self.first_positions_B[index_B]
        return kept_rows


def make_lots(boundaries: list[tuple[Boundary, int]]) -> list[Lot]:
    """Neighbours with equal n and lengths within a factor of two share a lot; the shorter ones are padded."""
    lots, start = [], 0
    for (n, _), members in groupby(boundaries, key=lambda item: (item[1], math.frexp(item[0].token_count)[1])):
        group = [boundary for boundary, _ in members]
        lots.append(_make_lot(group, start, n))
        start = lots[-1].stop
    return lots


def _make_lot(group: list[Boundary], start: int, n: int) -> Lot:
    lengths = [boundary.token_count for boundary in group]
    longest = max(lengths)
    keys, values = [], []
    for pairs in zip(*(boundary.layers for boundary in group)):
        stacked = [[F.pad(x, (0, 0, 0, 0, 0, longest - len(x))) for x in half] for half in zip(*pairs)]
        k_gPKd, v_gPKd = (torch.stack(half) for half in stacked)
        keys.append(k_gPKd.permute(0, 2, 3, 1).flatten(0, 1).contiguous())
        values.append(v_gPKd.transpose(1, 2).flatten(0, 1).contiguous())
    padding = None
    if min(lengths) < longest:
        columns = torch.arange(longest, device=keys[0].device)
        absent = columns[None] >= torch.tensor(lengths).to(columns.device)[:, None]
        padding = torch.zeros(absent.shape, dtype=keys[0].dtype, device=columns.device).masked_fill_(absent, -torch.inf)
        padding = padding[:, None, None]
    for boundary in group:
        boundary.release()
    return Lot(start, start + n * len(group), len(group), keys, values, padding)


def _kept_lot(lot: Lot, flags: torch.Tensor, kv_heads: int, *, start: int, row_count: int) -> Lot:
    if bool(flags.all()):
        return Lot(start, start + row_count, lot.groups, lot.keys, lot.values, lot.padding)

    chosen = flags.to(lot.keys[0].device)

    def kept(halves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.unflatten(0, (lot.groups, kv_heads))[chosen].flatten(0, 1) for x in halves]

    padding = None if lot.padding is None else lot.padding[chosen]
    return Lot(start, start + row_count, int(flags.sum()), kept(lot.keys), kept(lot.values), padding)
