"""Tiles of packed suffixes from lengths alone, against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollplex.model.attention import block_mask, suffix_mask
from rollplex.model.suffix_blocks import TILE, suffix_tiles

CASES = [(0, [1]), (1, [1, 1]), (5, [300]), (128, [128, 128]), (256, [1, 127, 500, 3]), (300, [64] * 9),
         (1000, [40, 700, 1, 129]),
         (127, [129]), (2047, [1023, 1, 1024])]


def dense(boundary, lengths):
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return suffix_mask(boundary, index, lengths, torch.float32, 64) == 0, index


@pytest.mark.parametrize(("boundary", "lengths"), CASES)
def test_tiles_say_what_the_dense_mask_says(boundary, lengths):
    visible, _ = dense(boundary, lengths)
    tiles = suffix_tiles(boundary, lengths)
    rows, columns = (-(-size // TILE) for size in visible.shape)
    padded = np.zeros((rows * TILE, columns * TILE), dtype=bool)
    padded[:visible.shape[0], :visible.shape[1]] = visible.numpy()
    blocks = padded.reshape(rows, TILE, columns, TILE).swapaxes(1, 2)
    np.testing.assert_array_equal(tiles.full, blocks.all((2, 3)))
    np.testing.assert_array_equal(tiles.partial, blocks.any((2, 3)) & ~blocks.all((2, 3)))


@pytest.mark.parametrize(("boundary", "lengths"), CASES)
def test_the_block_mask_is_the_dense_mask(boundary, lengths):
    visible, index = dense(boundary, lengths)
    mask = block_mask(boundary, index, lengths)
    assert mask.seq_lengths == tuple(visible.shape)
    queries, keys = (torch.arange(size) for size in visible.shape)
    torch.testing.assert_close(mask.mask_mod(0, 0, queries[:, None], keys[None]), visible)
    tiles = suffix_tiles(boundary, lengths)
    np.testing.assert_array_equal(mask.to_dense()[0, 0].numpy().astype(bool), tiles.partial | tiles.full)


def test_a_long_boundary_costs_no_mask():
    tiles = suffix_tiles(16384, [1024] * 8)
    assert tiles.full.shape == (64, 192)
    assert tiles.full[:, :128].all(), "the boundary is seen by all"
    assert tiles.partial.sum() == 64, "one diagonal tile a row"
