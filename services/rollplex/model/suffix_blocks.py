"""Which tiles of [queries, keys] packed suffixes see over a boundary, from lengths alone: nothing of size [T, S] is ever made.

Query r of sample s sees all B boundary keys and the suffix keys [start of s, r]. Over a tile's rows [q0, q1) the suffix keys
seen by any are [start of the first row's sample, q1 - 1], and those seen by all are known when one sample fills the rows.
Legend: T queries, B boundary tokens, S = B + T keys, Q and L numbers of query and key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TILE = 128
"""Rows and columns of a tile: FlexAttention's default."""


@dataclass(frozen=True)
class Tiles:
    """Of [Q, L] tiles: who must look at each key, who sees all of them, who nothing (neither)."""

    partial: np.ndarray
    """bool [Q, L]"""
    full: np.ndarray
    """bool [Q, L]"""


def suffix_tiles(boundary_tokens: int, lengths: Sequence[int]) -> Tiles:
    """`lengths`: tokens of each sample, in packed order, none 0."""
    queries = sum(lengths)
    keys = boundary_tokens + queries
    starts = np.cumsum([0, *lengths])[:-1]
    q0 = np.arange(0, queries, TILE)[:, None]
    q1 = np.minimum(q0 + TILE, queries)
    first, last = (np.searchsorted(starts, rows, side="right") - 1 for rows in (q0, q1 - 1))
    start = starts[first]
    k0 = np.arange(0, keys, TILE)[None]
    k1 = np.minimum(k0 + TILE, keys)
    own0, own1 = np.maximum(k0 - boundary_tokens, 0), k1 - boundary_tokens
    has_own = own1 > 0
    seen = (k0 < boundary_tokens) | (has_own & (own0 < q1) & (own1 > start))
    all_own = ~has_own | ((first == last) & (own0 >= start) & (own1 - 1 <= q0))
    # A ragged tile's padding is seen by nobody.
    whole = (q0 + TILE <= queries) & (k0 + TILE <= keys)
    full = seen & all_own & whole
    return Tiles(seen & ~full, full)


def ordered(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As FlexAttention lists them: tiles a row, int32 [Q]; and their columns first, then the others, int32 [Q, L]."""
    return tiles.sum(1, dtype=np.int32), np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
