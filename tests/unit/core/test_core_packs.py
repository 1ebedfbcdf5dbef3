"""Which groups share a suffix forward."""

from __future__ import annotations

from array import array

import pytest

from rollplex.core.packs import packs
from rollplex.core.work import ResponseGroup, ResponseSample


def group(index: int, samples: int) -> ResponseGroup:
    return ResponseGroup(index, tuple(ResponseSample(sample, array("q", [1])) for sample in range(samples)))


@pytest.mark.parametrize(("micro_batch_samples", "expected"), [
    (0, [[0], [1], [2], [3], [4]]), (3, [[0], [1], [2], [3], [4]]), (7, [[0], [1], [2], [3], [4]]), (8, [[0, 1], [2, 3], [4]]),
    (13, [[0, 1, 2], [3, 4]]), (100, [[0, 1, 2, 3, 4]])])
def test_as_many_whole_ones_as_there_is_room_for(micro_batch_samples, expected):
    found = [[one.group_index for one in pack] for pack in packs([group(index, 4) for index in range(5)], micro_batch_samples)]
    assert found == expected


def test_groups_of_unequal_size():
    sizes = [3, 1, 9, 2, 2, 4]
    found = [[len(one.samples) for one in pack] for pack in packs([group(index, size) for index, size in enumerate(sizes)], 5)]
    assert found == [[3, 1], [9], [2, 2], [4]]
    assert list(packs([], 5)) == []
