"""Which groups go through one pass together: their prompts through the prefix, their responses through the suffix. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeVar

from rollplex.core.errors import BadInput
from rollplex.core.work import PreparedGroup, ResponseGroup

Group = TypeVar("Group", PreparedGroup, ResponseGroup)


def packs(groups: Iterable[Group], groups_per_pass: int) -> list[list[Group]]:
    """Those that are here of each block of `groups_per_pass` (RunConfig) indices, by index; blocks as they first appear. Which
    groups meet depends on their indices alone, so what is done again, or only for some, is done in the same company.

    Raises BadInput for a group that is there twice.
    """
    found: dict[int, list[Group]] = defaultdict(list)
    groups = list(groups)
    times = Counter(group.group_index for group in groups)
    if twice := sorted(index for index, count in times.items() if count > 1):
        raise BadInput(f"groups {twice[:8]} are there more than once", reason="GROUP_TWICE", groups=twice[:8])
    for group in groups:
        found[group.group_index // groups_per_pass].append(group)
    return [sorted(pack, key=lambda group: group.group_index) for pack in found.values()]


def companions(indices: Iterable[int], group_count: int, groups_per_pass: int) -> list[int]:
    """Of all groups of an iteration, those that go through a pass with one of `indices`, themselves included."""
    blocks = {index // groups_per_pass for index in indices}
    return [index for index in range(group_count) if index // groups_per_pass in blocks]
