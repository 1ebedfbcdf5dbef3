"""The command board: order, duplicates, gaps, epochs, abort, deadlines, resumed watches."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollplex.core.errors import Aborted, BadInput, DeadlineExceeded, NotFound, WrongState
from rollplex.rpc.commands import KEPT_COMMANDS, CommandBoard, Progress, Result


@pytest.fixture
def board():
    owner = ThreadPoolExecutor(max_workers=1)
    board = CommandBoard(owner)
    board.join(1)
    yield board
    owner.shutdown()


async def outcome(board, command_id):
    events = [event async for _, event in board.watch(command_id, 0)]
    return events[-1]


async def test_commands_run_in_sequence_order_and_a_gap_waits(board):
    ran = []
    board.start("third", 1, 3, 5, lambda _: ran.append(3))
    board.start("second", 1, 2, 5, lambda _: ran.append(2))
    await asyncio.sleep(0.05)
    assert ran == []
    board.start("first", 1, 1, 5, lambda _: ran.append(1))
    assert isinstance(await outcome(board, "third"), Result)
    assert ran == [1, 2, 3]


async def test_a_duplicate_runs_once_and_returns_the_recorded_outcome(board):
    ran = []
    assert board.start("one", 1, 1, 5, lambda _: ran.append(1) or "value") is False
    first = await outcome(board, "one")
    assert board.start("one", 1, 1, 5, lambda _: ran.append(1)) is True
    assert await outcome(board, "one") is first
    assert (ran, first.value) == ([1], "value")


async def test_a_watch_resumes_after_its_cursor(board):
    def work(context):
        for done in range(3):
            context.progress(done, 3, "groups")
        return "end"

    board.start("one", 1, 1, 5, work)
    everything = [item async for item in board.watch("one", 0)]
    assert [cursor for cursor, _ in everything] == [1, 2, 3, 4]
    assert [event async for _, event in board.watch("one", 2)] == [Progress(2, 3, "groups"), everything[-1][1]]


async def test_stale_places_are_refused(board):
    board.start("one", 1, 1, 5, lambda _: None)
    with pytest.raises(WrongState, match="sequence 1 is taken"):
        board.start("other", 1, 1, 5, lambda _: None)
    with pytest.raises(WrongState, match="epoch 2"):
        board.start("other", 2, 2, 5, lambda _: None)
    with pytest.raises(NotFound):
        await outcome(board, "nobody")


async def test_a_gap_that_is_not_filled_runs_into_its_deadline(board):
    board.start("late", 1, 2, 0.05, lambda _: None)
    assert isinstance(await outcome(board, "late"), DeadlineExceeded)


async def test_abort_is_out_of_band(board):
    started, go_on = threading.Event(), threading.Event()

    def work(context):
        started.set()
        go_on.wait(5)
        context.check()

    board.start("one", 1, 1, 5, work)
    await asyncio.to_thread(started.wait, 5)
    assert board.abort("one") is True
    go_on.set()
    assert isinstance(await outcome(board, "one"), Aborted)
    assert board.abort("one") is False


async def test_work_that_ignores_its_deadline_is_reported_at_the_deadline(board):
    go_on = threading.Event()
    board.start("slow", 1, 1, 0.05, lambda _: go_on.wait(5))
    assert isinstance(await outcome(board, "slow"), DeadlineExceeded)
    go_on.set()


async def test_a_new_epoch_ends_the_old_ones_commands_and_starts_at_one(board):
    board.start("waiting", 1, 2, 5, lambda _: None)
    board.join(2)
    assert isinstance(await outcome(board, "waiting"), Aborted)
    with pytest.raises(WrongState) as stale:
        board.join(1)
    assert stale.value.metadata["epoch"] == "2"
    board.start("fresh", 2, 1, 5, lambda _: "ok")
    assert (await outcome(board, "fresh")).value == "ok"


async def test_errors_keep_their_kind(board):
    def user_mistake(_):
        raise ValueError("seven is wrong")

    board.start("one", 1, 1, 5, user_mistake)
    failure = await outcome(board, "one")
    assert isinstance(failure, BadInput)
    assert str(failure) == "seven is wrong"


async def test_ended_commands_are_forgotten_in_the_end(board):
    for number in range(1, 3 * KEPT_COMMANDS):
        board.start(f"c{number}", 1, number, 5, lambda _: None)
        await outcome(board, f"c{number}")
    assert len(board._commands) <= KEPT_COMMANDS + 1
    with pytest.raises(NotFound):
        await outcome(board, "c1")


async def test_a_forgotten_command_is_gone_though_its_deadline_is_far(board):
    def work(context):
        return bytearray(1)

    board.start("first", 1, 1, 3600, work)
    first = weakref.ref(board._find("first"))
    for number in range(2, 3 * KEPT_COMMANDS):
        board.start(f"c{number}", 1, number, 3600, lambda _: None)
        await outcome(board, f"c{number}")
    gc.collect()
    assert first() is None
