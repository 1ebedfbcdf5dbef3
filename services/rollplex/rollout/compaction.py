"""Groups that have finished leave a decode state: their rows go, and their keys and values are freed.

Legend: B rows, K kv heads, R response capacity, P boundary tokens, g groups of a lot, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollplex.model import DecodeState
from rollplex.model.decode import Lot


@torch.inference_mode()
def keep_groups(state: DecodeState, kept: Sequence[bool]) -> torch.Tensor:
    """Drops the groups whose flag in `kept` (one a group, in order) is False. Returns the kept rows' old numbers."""
    kv_heads = state.keys[0].shape[1]
    lots, rows, group = [], [], 0
    for lot in state.lots:
        flags = torch.tensor(kept[group : group + lot.groups])
        group += lot.groups
        old_rows = torch.arange(lot.start, lot.stop).view(lot.groups, -1)[flags].flatten()
        if len(old_rows):
            lots.append(_kept_lot(lot, flags, kv_heads, start=sum(map(len, rows)), row_count=len(old_rows)))
            rows.append(old_rows)
    index_B = torch.cat(rows)
    used = state.step
    for halves in (state.keys, state.values):
        for layer, old_BKRd in enumerate(halves):
            new = old_BKRd.new_empty(len(index_B), *old_BKRd.shape[1:])
            new[:, :, :used] = old_BKRd[:, :, :used].index_select(0, index_B)
            halves[layer] = new
    state.lots = lots
    state.first_tokens_B = state.first_tokens_B[index_B]
    state.first_positions_B = state.first_positions_B[index_B]
    return index_B


def _kept_lot(lot: Lot, flags: torch.Tensor, kv_heads: int, *, start: int, row_count: int) -> Lot:
    if bool(flags.all()):
        return Lot(start, start + row_count, lot.groups, lot.keys, lot.values, lot.padding)

    def kept(halves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.unflatten(0, (lot.groups, kv_heads))[flags].flatten(0, 1) for x in halves]

    padding = None if lot.padding is None else lot.padding[flags]
    return Lot(start, start + row_count, int(flags.sum()), kept(lot.keys), kept(lot.values), padding)
