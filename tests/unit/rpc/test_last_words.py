"""A process that can do nothing more tells its error and ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollplex.core.errors import InternalError, OutOfMemory, RollplexError
from rollplex.rpc.commands import CommandBoard
from rollplex.rpc.last_words import FATAL_REASONS, end_when_fatal


@pytest.mark.parametrize("reason", sorted(FATAL_REASONS))
def test_a_fatal_error_ends_the_process_in_a_moment(reason):
    ended = threading.Event()
    end_when_fatal(InternalError("the GPU is gone", reason=reason), end=ended.set, tell_s=0.01)
    assert ended.wait(10)


def test_any_other_error_does_not():
    ended = threading.Event()
    end_when_fatal(OutOfMemory("too much", reason="OUT_OF_DEVICE_MEMORY"), end=ended.set, tell_s=0.0)
    assert not ended.wait(0.2)


async def test_whoever_watches_a_command_hears_of_it_and_so_does_the_host():
    heard: list[RollplexError] = []

    def broken(context):
        raise InternalError("the GPU is gone", reason="DEVICE_FAULT")

    with ThreadPoolExecutor(1) as owner:
        board = CommandBoard(owner, heard.append)
        board.start("c", 0, 1, 10.0, broken)
        events = [event async for _, event in board.watch("c", 0)]
    assert [event.reason for event in events] == ["DEVICE_FAULT"] == [error.reason for error in heard]
