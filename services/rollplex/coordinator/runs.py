"""The runs of the journal, the one that is open, and each one's events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from rollplex.coordinator.events import EventLog
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import Iteration, Run, RunState, StateChange
from rollplex.core.config import RunConfig
from rollplex.core.errors import AlreadyExists, NotFound, WrongState
from rollplex.core.strict import parse


def config_of(run: Run) -> RunConfig:
    return parse(RunConfig, json.loads(run.config_json))


class Runs:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._by_name: dict[str, Run] = {}
        self._logs: dict[str, EventLog] = {}
        self.open: Run | None = None
        """At most one has slabs."""

    async def load(self) -> None:
        """From the journal. A run that was being opened when a coordinator died has failed."""
        for run in await self._journal.runs():
            self._by_name[run.name] = run
            run.last_sequence = await self._journal.last_sequence(run.name)
            if run.state in (RunState.ACTIVE, RunState.RECOVERING) and self.open is None:
                self.open = run
            elif run.state is RunState.OPENING:
                run.state = RunState.FAILED
                await self._journal.put_run(run)

    async def add(self, run: Run) -> None:
        self._by_name[run.name] = run
        run.last_sequence = await self._journal.last_sequence(run.name)

    async def opened(self, run: Run) -> None:
        run.state = RunState.ACTIVE
        await self._journal.put_run(run)
        self.open = run

    async def close_open(self) -> None:
        """Its slabs are another's from here on, or gone."""
        if self.open is not None:
            self.open.state = RunState.CLOSED
            await self._journal.put_run(self.open)
            self.open = None

    def __iter__(self) -> Iterator[Run]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Run | None:
        return self._by_name.get(name)

    def get(self, name: str) -> Run:
        """Raises NotFound."""
        if name not in self._by_name:
            raise NotFound(f"no run {name!r}", reason="RUN_NOT_FOUND", run=name)
        return self._by_name[name]

    def log_of(self, run: Run) -> EventLog:
        if run.name not in self._logs:
            self._logs[run.name] = EventLog(self._journal, run.name, run.last_sequence)
        return self._logs[run.name]

    def last_sequence(self, run: Run) -> int:
        return self._logs[run.name].last_sequence if run.name in self._logs else run.last_sequence

    def emit_state(self, iteration: Iteration) -> None:
        self.log_of(self.get(iteration.key.run)).emit(iteration.key, StateChange(dataclasses.asdict(iteration)))

    async def tell_again(self, run: Run) -> None:
        """What the journal says of an iteration and no event does: whoever waits for it would wait for ever."""
        told = await self._journal.told_states(run.name)
        for iteration in await self._journal.iterations(run.name):
            if told.get(iteration.key) != iteration.state.value:
                self.emit_state(iteration)

    async def close(self) -> None:
        """Ends the events, not the runs."""
        for event_log in self._logs.values():
            await event_log.close()


def check_same(known: Run, config_text: str) -> Run:
    """The run, for a client that creates it again. Raises AlreadyExists, or WrongState where it is closed."""
    if known.config_json != config_text:
        raise AlreadyExists(f"run {known.name!r} exists with another config", reason="RUN_EXISTS", run=known.name)
    if known.state is RunState.CLOSED:
        raise WrongState(f"run {known.name!r} is closed; its weights went when the next run was opened",
                         reason="RUN_CLOSED", run=known.name)
    return known
