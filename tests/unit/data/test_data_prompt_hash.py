"""One hash for whatever holds the numbers."""

from __future__ import annotations

import hashlib
import struct
from array import array

import numpy as np
import pytest
import torch

from rollplex.core.prompt_hash import prompt_hash


def test_lists_arrays_and_tensors_hash_alike():
    ids, grid, seconds = [5, 6, 7], [[1, 2, 2], [4, 2, 2]], [0.3, 1.0]
    expected = prompt_hash(ids, None, grid, seconds)
    assert expected == prompt_hash(array("q", ids), [], np.array(grid), np.array(seconds))
    assert expected == prompt_hash(np.array(ids, np.int32), None, torch.tensor(grid), torch.tensor(seconds, dtype=torch.float32))


def test_the_bytes_are_what_the_page_says():
    digest = hashlib.sha256()
    digest.update(b"tokens:2;" + struct.pack("<2q", 1, 2))
    digest.update(b"images:3;" + struct.pack("<3q", 1, 2, 4))
    digest.update(b"videos:0;" + b"seconds:1;" + struct.pack("<f", 0.5))
    assert prompt_hash([1, 2], [[1, 2, 4]], None, [0.5]) == digest.hexdigest()


def test_every_part_counts():
    hashes = {
        prompt_hash([1, 2, 3]),
        prompt_hash([1, 2], [[1, 2, 3]]),
        prompt_hash([1, 2], None, [[1, 2, 3]]),
        prompt_hash([1, 2], None, [[1, 2, 3]], [1.0]),
        prompt_hash([1, 2], None, [[1, 2, 3]], [0.5]),
        prompt_hash([1, 2], None, [[1, 3, 2]], [0.5]),
    }
    assert len(hashes) == 6


def test_a_grid_has_three_columns():
    with pytest.raises(ValueError, match="images must be"):
        prompt_hash([1], [[1, 2]])
