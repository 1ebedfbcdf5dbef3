"""A journal whose file may not grow: a page limit of SQLite's own on the connection that writes."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from rollplex.coordinator.events import EventLog
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import Iteration, IterationKey, IterationState, Note, Run
from rollplex.core.errors import DataLoss, Unavailable

KEY = IterationKey("run", 0, False)
LARGE = [{"text": "x" * 400_000}]


class Limited:
    """A journal on which `fill` takes all room and `make_room` gives it back."""

    def __init__(self, path, wait_s):
        self.journal = Journal(path, wait_s)

    def _limit(self, pages):
        return self.journal._db.execute(f"PRAGMA max_page_count = {pages}").fetchone()[0]

    async def fill(self):
        pages = (await self.journal._rows("PRAGMA page_count"))[0][0]
        assert await self.journal._call(self._limit, pages) == pages

    async def make_room(self):
        await self.journal._call(self._limit, 1 << 30)


@pytest.fixture
async def limited(tmp_path):
    made = Limited(tmp_path / "journal.sqlite", 0.3)
    yield made
    await made.journal.close()


async def test_what_begins_is_refused_and_nothing_of_it_is_there(limited):
    run, iteration = Run("run", "{}", 1.0), Iteration(KEY, "request", 1.0, 0)
    await limited.journal.put_run(run)
    await limited.fill()
    with pytest.raises(Unavailable, match="cannot grow") as refused:
        await limited.journal.add_iteration(run, iteration, LARGE)
    assert refused.value.reason == "JOURNAL_FULL"
    assert await limited.journal.iterations("run") == []
    assert [known.name for known in await limited.journal.runs()] == ["run"]
    await limited.make_room()
    await limited.journal.add_iteration(run, iteration, LARGE)
    assert await limited.journal.prompts(KEY) == LARGE


async def test_a_write_waits_for_room_within_its_time(tmp_path):
    limited = Limited(tmp_path / "journal.sqlite", 30.0)
    run = Run("run", "{}", 1.0)
    await limited.fill()
    writing = asyncio.create_task(limited.journal.add_iteration(run, Iteration(KEY, "request", 1.0, 0), LARGE))
    done, _ = await asyncio.wait([writing], timeout=0.5)
    assert not done
    assert await limited.journal.runs() == []  # reading goes on
    await limited.make_room()
    await writing
    assert len(await limited.journal.iterations("run")) == 1
    await limited.journal.close()


async def test_what_has_happened_waits_as_long_as_it_takes(limited):
    run, iteration = Run("run", "{}", 1.0), Iteration(KEY, "request", 1.0, 0)
    await limited.journal.add_iteration(run, iteration, [])
    await limited.fill()
    iteration.state, iteration.metrics = IterationState.DONE, {"x" * 300_000: 1.0}
    ending = asyncio.create_task(limited.journal.put_iteration(iteration))
    done, _ = await asyncio.wait([ending], timeout=1.0)  # longer than `full_wait_s`
    assert not done
    await limited.make_room()
    await ending
    assert (await limited.journal.iteration(KEY)).state is IterationState.DONE


async def test_events_wait_without_gaps_and_are_seen_once_written(limited):
    log = EventLog(limited.journal, "run", 0)
    log.emit(KEY, Note("info", "FIRST", "fits"))
    await log.flush()
    await limited.fill()
    log.emit(KEY, Note("info", "SECOND", "y" * 300_000))
    log.emit(KEY, Note("info", "THIRD", "z"))
    await asyncio.sleep(0.6)
    assert [event.sequence for event in await limited.journal.events("run", 0, 10)] == [1]
    await limited.make_room()
    await log.flush()
    assert [event.sequence for event in await limited.journal.events("run", 0, 10)] == [1, 2, 3]
    await log.close()


async def test_a_process_that_ends_does_not_wait(limited):
    log = EventLog(limited.journal, "run", 0)
    await limited.fill()
    log.emit(KEY, Note("info", "FIRST", "y" * 300_000))
    await asyncio.sleep(0.1)
    limited.journal.give_up_waiting()
    await asyncio.wait_for(log.close(), 5)
    with pytest.raises(DataLoss, match="JOURNAL_FULL|cannot grow"):
        await log.flush()


async def test_another_error_is_not_waited_for(limited):
    await limited.journal._call(limited.journal._db.execute, "DROP TABLE events")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await asyncio.wait_for(limited.journal.add_events("run", [object_event()]), 5)


def object_event():
    from rollplex.coordinator.records import Event

    return Event(1, 1.0, 0, False, Note("info", "X", "x"))
