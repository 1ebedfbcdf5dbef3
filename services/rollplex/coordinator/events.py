"""The event log of a run: sequence numbers without gaps, written to the journal before anybody sees them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator

from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import Event, EventBody, IterationKey
from rollplex.core.errors import DataLoss, Unavailable

PAGE = 500
"""Events read from the journal at a time."""


class EventLog:
    """Events of one run. `emit` queues without waiting; one writer task commits what has queued up and wakes the watchers."""

    def __init__(self, journal: Journal, run: str, last_sequence: int) -> None:
        self._journal, self._run = journal, run
        self._queued: list[Event] = []
        self._next = last_sequence + 1
        self.committed = last_sequence
        self._wake = asyncio.Event()
        self._advanced = asyncio.Event()
        self._failure: Exception | None = None
        self._writer = asyncio.create_task(self._write(), name=f"events-{run}")

    @property
    def last_sequence(self) -> int:
        return self._next - 1

    def emit(self, key: IterationKey | None, body: EventBody) -> int:
        """Gives the event its number; it becomes visible once committed."""
        event = Event(self._next, time.time(), key.iteration if key else -1, bool(key and key.validation), body)
        self._next += 1
        self._queued.append(event)
        self._wake.set()
        return event.sequence

    async def flush(self) -> None:
        """Waits until everything emitted so far is committed."""
        wanted = self.last_sequence
        while self.committed < wanted:
            advanced = self._advanced
            self._check()
            await advanced.wait()

    async def watch(self, after_sequence: int) -> AsyncIterator[Event]:
        """Events after a number: the past from the journal, then live, without end."""
        while True:
            advanced = self._advanced
            self._check()
            events = await self._journal.events(self._run, after_sequence, PAGE)
            for event in events:
                after_sequence = event.sequence
                yield event
            if not events and after_sequence >= self.committed:
                await advanced.wait()

    async def close(self) -> None:
        """Commits what there is room for: the rest nobody has seen, and its numbers are given again."""
        with contextlib.suppress(DataLoss):
            await self.flush()
        self._writer.cancel()

    def _check(self) -> None:
        if self._failure is not None:
            raise DataLoss(f"events of run {self._run} cannot be written: {self._failure}", reason="JOURNAL_WRITE_FAILED")

    async def _write(self) -> None:
        while self._failure is None:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queued = self._queued, []
            if not batch:
                continue
            try:
                await self._journal.add_events(self._run, batch)
                self.committed = batch[-1].sequence
            except (sqlite3.Error, Unavailable) as error:
                self._failure = error
            self._advanced.set()
            self._advanced = asyncio.Event()
