"""Which groups go through one pass together: their prompts through the prefix, their responses through the suffix. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from rollplex.core.work import PreparedGroup, ResponseGroup

Group = TypeVar("Group", PreparedGroup, ResponseGroup)


def packs(groups: Iterable[Group], groups_per_pass: int) -> Iterator[list[Group]]:
    """In order: those that are here of each block of `groups_per_pass` (RunConfig) indices. Which groups meet depends on nothing
    but their indices, so what is done again, or only for some, is done in the same company."""
    for _, pack in groupby(groups, key=lambda group: group.group_index // groups_per_pass):
        yield list(pack)


def companions(indices: Iterable[int], group_count: int, groups_per_pass: int) -> list[int]:
    """Of all groups of an iteration, those that go through a pass with one of `indices`, themselves included."""
    blocks = {index // groups_per_pass for index in indices}
    return [index for index in range(group_count) if index // groups_per_pass in blocks]
