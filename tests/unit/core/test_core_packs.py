"""Which groups go through a pass together."""

from __future__ import annotations

from array import array

import pytest

from rollplex.core.config import RunConfig, SamplingConfig
from rollplex.core.errors import BadInput
from rollplex.core.packs import companions, packs
from rollplex.core.work import ResponseGroup, ResponseSample


def groups(*indices: int) -> list[ResponseGroup]:
    return [ResponseGroup(index, tuple(ResponseSample(sample, array("q", [1])) for sample in range(4))) for index in indices]


def packed(indices: range | list[int], size: int) -> list[list[int]]:
    return [[one.group_index for one in pack] for pack in packs(groups(*indices), size)]


@pytest.mark.parametrize(("micro_batch_samples", "expected"), [(0, 1), (3, 1), (4, 1), (7, 1), (8, 2), (13, 3), (100, 25)])
def test_as_many_whole_groups_as_a_micro_batch_has_room_for(micro_batch_samples, expected):
    config = RunConfig(suffix_micro_batch_samples=micro_batch_samples, sampling=SamplingConfig(samples_per_group=4))
    assert config.groups_per_pass == expected


@pytest.mark.parametrize(("size", "expected"), [
    (1, [[0], [1], [2], [3], [4]]), (2, [[0, 1], [2, 3], [4]]), (3, [[0, 1, 2], [3, 4]]), (25, [[0, 1, 2, 3, 4]])])
def test_neighbours_go_together(size, expected):
    assert packed(range(5), size) == expected


def test_who_is_left_out_does_not_change_who_else_meets():
    assert packed([0, 2, 3, 5, 8], 2) == [[0], [2, 3], [5], [8]]
    assert packed([], 2) == []


def test_the_order_of_a_request_decides_nothing_but_which_pack_comes_first():
    assert packed([5, 2, 0, 3, 4, 1], 2) == [[4, 5], [2, 3], [0, 1]]
    with pytest.raises(BadInput, match=r"groups \[2\] are there more than once"):
        packed([2, 0, 2], 2)


@pytest.mark.parametrize(("indices", "size", "expected"), [
    ([1, 6], 1, [1, 6]), ([1, 6], 2, [0, 1, 6]), ([1, 6], 3, [0, 1, 2, 6]), ([], 2, []), ([0], 100, list(range(7)))])
def test_companions_are_the_whole_passes_of_some_groups(indices, size, expected):
    """Of seven groups; the last pass has fewer."""
    found = companions(indices, 7, size)
    assert found == expected
    whole = packed(range(7), size)
    assert all(pack in whole for pack in packed(found, size))
