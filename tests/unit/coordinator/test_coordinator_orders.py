"""How orders are cut into messages."""

from __future__ import annotations

from array import array

import pytest

from rollplex.coordinator import orders
from rollplex.core.packs import packs
from rollplex.core.work import ResponseGroup, ResponseSample


def groups(count: int, tokens: int) -> list[ResponseGroup]:
    return [ResponseGroup(index, tuple(ResponseSample(sample, array("q", [1] * tokens)) for sample in range(4)))
            for index in range(count)]


@pytest.mark.parametrize(("groups_per_pass", "expected"), [
    (1, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    # Two groups that share a pass go in one message, though three would have room.
    (2, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
    # A pack that is larger than a message is one all the same.
    (4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])])
def test_messages_end_where_packs_do(monkeypatch, groups_per_pass, expected):
    group_bytes = 4 * (100 * orders.TOKEN_BYTES + 64)
    monkeypatch.setattr(orders, "MAX_MESSAGE_BYTES", 4 * 3 * group_bytes)
    messages = orders.in_messages(packs(groups(10, 100), groups_per_pass))
    assert [[group.group_index for group in message] for message in messages] == expected
    again = [list(packs(message, groups_per_pass)) for message in messages]
    assert [pack for message in again for pack in message] == list(packs(groups(10, 100), groups_per_pass))


def test_no_groups_are_no_message():
    assert orders.in_messages(packs([], 8)) == []
