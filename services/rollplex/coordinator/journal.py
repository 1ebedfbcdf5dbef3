"""The journal: runs, iterations, samples, events, updates and rewards in one SQLite file.

Every write is committed (and synced) before its call returns; calls run on one thread, in order. While the disk is full a write
waits for room: what begins something only so long, since it can be refused; what records what has happened until there is some.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollplex.coordinator.records import (
    EVENT_KINDS,
    Event,
    Iteration,
    IterationKey,
    PhaseSpan,
    RewardRegistration,
    Run,
    RunState,
    SampleRecord,
    UpdateRecord,
    iteration_from_json,
)
from rollplex.core.errors import DataLoss, Unavailable, WrongState

log = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_RETRY_S = 0.25
NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
"""A full disk, a quota or a file's size limit; nothing of the transaction is written then."""

SCHEMA_VERSION = 3
SCHEMA = """
CREATE TABLE runs (name TEXT PRIMARY KEY, body TEXT NOT NULL, create_time_s REAL NOT NULL);
CREATE TABLE iterations (
    run TEXT NOT NULL, validation INTEGER NOT NULL, iteration INTEGER NOT NULL, request_id TEXT NOT NULL,
    body TEXT NOT NULL, prompts TEXT NOT NULL,
    PRIMARY KEY (run, validation, iteration), UNIQUE (run, request_id));
CREATE TABLE samples (
    run TEXT NOT NULL, validation INTEGER NOT NULL, iteration INTEGER NOT NULL,
    group_index INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, finish_reason TEXT NOT NULL, text TEXT NOT NULL,
    reward REAL, advantage REAL, parts TEXT NOT NULL, scored INTEGER NOT NULL, reference_logprobs BLOB, old_logprobs BLOB,
    PRIMARY KEY (run, validation, iteration, group_index, sample_index)) WITHOUT ROWID;
CREATE TABLE events (
    run TEXT NOT NULL, sequence INTEGER NOT NULL, time_s REAL NOT NULL, iteration INTEGER NOT NULL,
    validation INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (run, sequence)) WITHOUT ROWID;
CREATE TABLE updates (
    run TEXT NOT NULL, snapshot INTEGER NOT NULL, body TEXT NOT NULL, published INTEGER NOT NULL,
    PRIMARY KEY (run, snapshot)) WITHOUT ROWID;
CREATE TABLE rewards (name TEXT PRIMARY KEY, body TEXT NOT NULL);
"""


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise DataLoss(f"journal {path} is no SQLite database: {error}", reason="JOURNAL_CORRUPT") from error
    if version == 0 and tables == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif version != SCHEMA_VERSION:
        raise WrongState(
            f"journal {path} has schema version {version}; this Rollplex reads version {SCHEMA_VERSION}. Move the file "
            "away to start a new one, or use the Rollplex that wrote it", reason="JOURNAL_VERSION",
            found=version, supported=SCHEMA_VERSION)
    return connection


class Journal:
    """All methods are awaitables of one writer thread."""

    def __init__(self, path: Path, full_wait_s: float = 30.0) -> None:
        """`full_wait_s`: CoordinatorConfig.journal_full_wait_s."""
        self._path, self._full_wait_s, self._closing = path, full_wait_s, False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = _open(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def give_up_waiting(self) -> None:
        """Writes that wait for room fail from now on: the process ends, and its successor takes over what is committed."""
        self._closing = True

    async def close(self) -> None:
        await self._call(self._db.close)
        self._thread.shutdown()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _commit(self, statements: Sequence[tuple[str, Iterable[Sequence[Any]]]], *, must: bool = False) -> None:
        """Runs all statements, each for all its rows, in one transaction.

        Raises Unavailable when there is no room for `full_wait_s`; if it `must` be written, not before the process ends.
        """
        def commit() -> None:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                for sql, rows in statements:
                    self._db.executemany(sql, rows)

        deadline, waited = time.monotonic() + self._full_wait_s, False
        while True:
            try:
                await self._call(commit)
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode not in NO_ROOM:
                    raise
                if self._closing or (not must and time.monotonic() > deadline):
                    raise Unavailable(f"the journal {self._path} cannot grow: {error}. Make room on its disk and try again; "
                                      "what was acknowledged is in it", reason="JOURNAL_FULL", path=self._path) from error
                if not waited:
                    log.error("the journal %s cannot grow: %s; waiting for room", self._path, error)
                waited = True
            await asyncio.sleep(ROOM_RETRY_S)
        if waited:
            log.warning("the journal %s has room again", self._path)

    async def _rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return await self._call(lambda: self._db.execute(sql, arguments).fetchall())

    # Runs

    async def put_run(self, run: Run) -> None:
        await self._commit([_put_run(run)], must=run.state is not RunState.OPENING)

    async def runs(self) -> list[Run]:
        """Newest first."""
        rows = await self._rows("SELECT body FROM runs ORDER BY create_time_s DESC")
        return [_run(json.loads(body)) for (body,) in rows]

    async def rewind(self, run: Run) -> None:
        """The run as it is from now on; what it did after `run.next_iteration` and `run.snapshot`, which is lost, is taken out.
        Its events stay."""
        ended = [(run.name, item.key.iteration) for item in await self.iterations(run.name)
                 if item.key.validation and not item.state.ended]
        later = [(run.name, run.next_iteration)]
        await self._commit([
            *((f"DELETE FROM {table} WHERE run = ? AND validation = 0 AND iteration >= ?", later)
              for table in ("iterations", "samples")),
            ("DELETE FROM iterations WHERE run = ? AND validation = 1 AND iteration = ?", ended),
            ("DELETE FROM updates WHERE run = ? AND snapshot >= ?", [(run.name, run.snapshot)]),
            _put_run(run)])

    # Iterations

    async def add_iteration(self, run: Run, iteration: Iteration, prompts: list[dict[str, Any]]) -> None:
        """The iteration and its run's new counters, in one transaction."""
        key = iteration.key
        await self._commit([
            ("INSERT INTO iterations VALUES (?, ?, ?, ?, ?, ?)",
             [(key.run, key.validation, key.iteration, iteration.request_id, _iteration_text(iteration),
               json.dumps(prompts))]),
            _put_run(run)])

    async def put_iteration(self, iteration: Iteration) -> None:
        await self._commit([_put_iteration(iteration)], must=iteration.state.ended)

    async def iterations(self, run: str) -> list[Iteration]:
        rows = await self._rows("SELECT body FROM iterations WHERE run = ? ORDER BY rowid", run)
        return [iteration_from_json(json.loads(body)) for (body,) in rows]

    async def iteration(self, key: IterationKey) -> Iteration | None:
        rows = await self._rows("SELECT body FROM iterations WHERE run = ? AND validation = ? AND iteration = ?",
                                key.run, key.validation, key.iteration)
        return iteration_from_json(json.loads(rows[0][0])) if rows else None

    async def iteration_by_request(self, run: str, request_id: str) -> Iteration | None:
        rows = await self._rows("SELECT body FROM iterations WHERE run = ? AND request_id = ?", run, request_id)
        return iteration_from_json(json.loads(rows[0][0])) if rows else None

    async def prompts(self, key: IterationKey) -> list[dict[str, Any]]:
        """The prompts as they were submitted."""
        rows = await self._rows("SELECT prompts FROM iterations WHERE run = ? AND validation = ? AND iteration = ?",
                                key.run, key.validation, key.iteration)
        return json.loads(rows[0][0])

    # Samples

    async def put_samples(self, key: IterationKey, samples: Iterable[SampleRecord]) -> None:
        rows = [(key.run, key.validation, key.iteration, sample.group_index, sample.sample_index,
                 sample.token_ids.tobytes(), sample.logprobs.tobytes(), sample.finish_reason, sample.text,
                 sample.reward, sample.advantage, json.dumps(sample.parts), sample.scored, _blob(sample.reference_logprobs),
                 _blob(sample.old_logprobs)) for sample in samples]
        await self._commit([(f"INSERT OR REPLACE INTO samples VALUES ({', '.join('?' * 15)})", rows)])

    async def delete_groups(self, key: IterationKey, groups: Iterable[int]) -> None:
        """All samples of these groups, which are generated again."""
        await self._commit([("DELETE FROM samples WHERE run = ? AND validation = ? AND iteration = ? AND group_index = ?",
                             [(key.run, key.validation, key.iteration, group) for group in groups])])

    async def samples(self, key: IterationKey) -> list[SampleRecord]:
        rows = await self._rows(
            "SELECT group_index, sample_index, token_ids, logprobs, finish_reason, text, reward, advantage, parts, scored, "
            "reference_logprobs, old_logprobs "
            "FROM samples WHERE run = ? AND validation = ? AND iteration = ? ORDER BY group_index, sample_index",
            key.run, key.validation, key.iteration)
        return [SampleRecord(group, sample, array("q", ids), array("f", logprobs), finish, text, reward, advantage,
                             json.loads(parts), bool(scored), _floats(reference), _floats(old))
                for group, sample, ids, logprobs, finish, text, reward, advantage, parts, scored, reference, old in rows]

    # Events

    async def add_events(self, run: str, events: Iterable[Event]) -> None:
        kinds = {kind: name for name, kind in EVENT_KINDS.items()}
        rows = [(run, event.sequence, event.time_s, event.iteration, event.validation, kinds[type(event.body)],
                 json.dumps(dataclasses.asdict(event.body))) for event in events]
        await self._commit([("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)], must=True)

    async def events(self, run: str, after_sequence: int, limit: int) -> list[Event]:
        rows = await self._rows(
            "SELECT sequence, time_s, iteration, validation, kind, body FROM events "
            "WHERE run = ? AND sequence > ? ORDER BY sequence LIMIT ?", run, after_sequence, limit)
        return [Event(sequence, time_s, iteration, bool(validation), EVENT_KINDS[kind](**json.loads(body)))
                for sequence, time_s, iteration, validation, kind, body in rows]

    async def last_span(self, key: IterationKey) -> Event | None:
        """The last event about a span of an iteration."""
        rows = await self._rows(
            "SELECT sequence, time_s, body FROM events WHERE run = ? AND validation = ? AND iteration = ? AND kind = 'phase' "
            "ORDER BY sequence DESC LIMIT 1", key.run, key.validation, key.iteration)
        return Event(rows[0][0], rows[0][1], key.iteration, key.validation, PhaseSpan(**json.loads(rows[0][2]))) if rows else None

    async def last_sequence(self, run: str) -> int:
        return (await self._rows("SELECT coalesce(max(sequence), 0) FROM events WHERE run = ?", run))[0][0]

    # Updates

    async def begin_update(self, run: str, record: UpdateRecord) -> None:
        """UPDATE_BEGIN: from here the run only rolls forward."""
        await self._commit([("INSERT OR REPLACE INTO updates VALUES (?, ?, ?, 0)",
                             [(run, record.snapshot, json.dumps(dataclasses.asdict(record)))])])

    async def publish(self, run: Run, snapshot: int) -> None:
        """The one record that makes the next snapshot the run's: update published, counters moved."""
        await self._commit([("UPDATE updates SET published = 1 WHERE run = ? AND snapshot = ?", [(run.name, snapshot)]),
                            _put_run(run)], must=True)

    async def published_updates(self, run: str, iteration: int) -> list[UpdateRecord]:
        """Of one iteration, in order."""
        rows = await self._rows("SELECT body FROM updates WHERE run = ? AND published = 1 ORDER BY snapshot", run)
        records = [UpdateRecord(**json.loads(body)) for (body,) in rows]
        return [record for record in records if record.iteration == iteration]

    async def open_update(self, run: str) -> UpdateRecord | None:
        """The update that was begun and is not published."""
        rows = await self._rows("SELECT body FROM updates WHERE run = ? AND published = 0", run)
        return UpdateRecord(**json.loads(rows[0][0])) if rows else None

    # Rewards

    async def put_reward(self, reward: RewardRegistration) -> None:
        await self._commit([("INSERT OR REPLACE INTO rewards VALUES (?, ?)",
                             [(reward.name, json.dumps(dataclasses.asdict(reward)))])])

    async def delete_reward(self, name: str) -> None:
        await self._commit([("DELETE FROM rewards WHERE name = ?", [(name,)])])

    async def rewards(self) -> list[RewardRegistration]:
        rows = await self._rows("SELECT body FROM rewards ORDER BY name")
        return [RewardRegistration(**json.loads(body)) for (body,) in rows]


def _blob(values: array | None) -> bytes | None:
    return None if values is None else values.tobytes()


def _floats(blob: bytes | None) -> array | None:
    return None if blob is None else array("f", blob)


def _put_run(run: Run) -> tuple[str, list[tuple[Any, ...]]]:
    return ("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)",
            [(run.name, json.dumps(dataclasses.asdict(run)), run.create_time_s)])


def _put_iteration(iteration: Iteration) -> tuple[str, list[tuple[Any, ...]]]:
    key = iteration.key
    return ("UPDATE iterations SET body = ? WHERE run = ? AND validation = ? AND iteration = ?",
            [(_iteration_text(iteration), key.run, key.validation, key.iteration)])


def _iteration_text(iteration: Iteration) -> str:
    return json.dumps(dataclasses.asdict(iteration))


def _run(body: dict[str, Any]) -> Run:
    return Run(**{**body, "state": RunState(body["state"])})
