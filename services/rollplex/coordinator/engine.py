"""The coordinator's work: runs, the queue of iterations, cancellation, recovery. No grpc, no proto."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollplex.coordinator import orders
from rollplex.coordinator.checkpoints import AUTO, FRESH, RunCheckpoints, restored_run
from rollplex.coordinator.events import EventLog
from rollplex.coordinator.intake import Intake
from rollplex.coordinator.iteration import run_iteration, run_validation
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import EngineGroup, Place
from rollplex.coordinator.recordings import Recordings
from rollplex.coordinator.records import (
    ErrorRecord,
    Event,
    EventBody,
    Iteration,
    IterationKey,
    IterationState,
    Note,
    Run,
    RunState,
    SampleRecord,
    StateChange,
    row_from_json,
    row_to_json,
)
from rollplex.coordinator.recovery import LOSSES
from rollplex.coordinator.rewards import RewardBook, RewardDesk
from rollplex.coordinator.run_config import read_config
from rollplex.coordinator.takeover import Job, finish_update, read_kept, take_up
from rollplex.coordinator.update import roll_forward
from rollplex.coordinator.work import IterationWork
from rollplex.core.checkpoints import Checkpoint
from rollplex.core.config import RunConfig
from rollplex.core.errors import (
    Aborted,
    AlreadyExists,
    BadInput,
    NotFound,
    RollplexError,
    Unavailable,
    WrongState,
    as_domain_error,
)
from rollplex.core.ids import check_run_name, new_id
from rollplex.core.phases import Phase
from rollplex.core.strict import parse, to_plain
from rollplex.core.work import CheckpointResult
from rollplex.data.rows import PromptRow

log = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_PAUSE_S = 0.02
PREPARE_PAUSE_S = 0.5
"""Where the broker is away as a coordinator takes over."""


class Coordinator:
    """One mesh's runs. All methods run on the event loop.

    What changes state runs in a task of its own (`_own`): a client that goes away, or whose deadline passes, never leaves it
    half done.
    """

    def __init__(self, mesh: Mesh, journal: Journal, intake: Intake, rewards: RewardBook, recordings: Recordings,
                 checkpoints: RunCheckpoints) -> None:
        self.mesh, self.journal, self.intake, self.rewards = mesh, journal, intake, rewards
        self.recordings, self.checkpoints = recordings, checkpoints
        self.runs: dict[str, Run] = {}
        self.open_run: Run | None = None
        self._logs: dict[str, EventLog] = {}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._jobs: dict[IterationKey, Job] = {}
        self._current: tuple[IterationWork, asyncio.Task[None]] | None = None
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._closing = False

    async def _own(self, change: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    # Life

    async def start(self) -> None:
        """Reads the journal and starts the queue. What an earlier coordinator was in goes on first, in the background."""
        await self.rewards.load()
        await self.intake.release_leftovers()
        for run in await self.journal.runs():
            self.runs[run.name] = run
            run.last_sequence = await self.journal.last_sequence(run.name)
            if run.state in (RunState.ACTIVE, RunState.RECOVERING) and self.open_run is None:
                self.open_run = run
            elif run.state is RunState.OPENING:
                run.state = RunState.FAILED
                await self.journal.put_run(run)
        if self.open_run is not None:
            await self._take_over(self.open_run)
        self._worker = asyncio.create_task(self._work(), name="iterations")

    async def _take_over(self, run: Run) -> None:
        if await self.journal.open_update(run.name) is not None:
            run.state = RunState.RECOVERING
        waiting = [item for item in await self.journal.iterations(run.name) if not item.state.ended]
        for iteration in sorted(waiting, key=lambda item: item.state is not IterationState.RUNNING):
            await self._prepare_again(run, iteration)

    async def _prepare_again(self, run: Run, iteration: Iteration) -> None:
        rows = [row_from_json(value) for value in await self.journal.prompts(iteration.key)]
        config = self.config_of(run)
        count = 1 if iteration.key.validation else config.sampling.samples_per_group
        kept = await read_kept(self.journal, iteration)
        deadline_s = time.monotonic() + config.recovery_timeout_s
        while True:
            try:
                prompts = await self.intake.prepare(iteration.key, rows, iteration.first_ordinal, count)
            except RollplexError as error:
                if error.reason in LOSSES and time.monotonic() < deadline_s:
                    await asyncio.sleep(PREPARE_PAUSE_S)
                    continue
                done, updates = (kept.all_updated, len(kept.updates)) if kept else (False, 0)
                await self._end(iteration, *_verdict(done, updates, error))
                return
            self._enqueue(Job(iteration, prompts, kept))
            return

    async def _finish_orphaned_update(self) -> None:
        """Rolls forward an update whose iteration cannot go on."""
        run = self.open_run
        record = await self.journal.open_update(run.name) if run is not None else None
        if record is not None and not any(job.kept and job.kept.open_update for job in self._jobs.values()):
            await roll_forward(self.mesh, self.journal, run, self.config_of(run), record,
                               lambda note: self.log_of(run).emit(None, note))

    async def close(self) -> None:
        """Leaves the journal as it is: the next coordinator takes over from there."""
        self._closing = True
        self.journal.give_up_waiting()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        # An iteration that has just ended may wait for one.
        await self.checkpoints.close()
        await asyncio.gather(*self._changes, return_exceptions=True)
        for event_log in self._logs.values():
            await event_log.close()
        await self.mesh.close()
        await self.journal.close()

    # Runs

    def run(self, name: str) -> Run:
        if name not in self.runs:
            raise NotFound(f"no run {name!r}", reason="RUN_NOT_FOUND", run=name)
        return self.runs[name]

    def config_of(self, run: Run) -> RunConfig:
        return parse(RunConfig, json.loads(run.config_json))

    def log_of(self, run: Run) -> EventLog:
        if run.name not in self._logs:
            self._logs[run.name] = EventLog(self.journal, run.name, run.last_sequence)
        return self._logs[run.name]

    def last_sequence(self, run: Run) -> int:
        return self._logs[run.name].last_sequence if run.name in self._logs else run.last_sequence

    async def create_run(self, name: str, config_json: str, resume: str = "") -> Run:
        """Opens a run from the model's checkpoint or a durable one; see CoordinatorService.CreateRun."""
        check_run_name(name)
        config = await read_config(config_json, self.recordings, self.mesh.topology)
        if config.replay and resume not in (*FRESH, AUTO):
            raise BadInput(f"run {name!r} is a replay: it starts where the recorded run did", reason="REPLAY_RESUMED")
        return await self._own(self._create_run(name, config, "" if config.replay else resume))

    async def _create_run(self, name: str, config: RunConfig, resume: str) -> Run:
        text = json.dumps(to_plain(config), sort_keys=True)
        async with self._changing:
            known = self.runs.get(name)
            known = known if known is not None and known.state is not RunState.FAILED else None
            there = known is not None and known is self.open_run and await self.mesh.holds(known)
            if known is not None and (resume in FRESH or (resume == AUTO and there)):
                return _same_run(known, text)
            restore, notes = await self.checkpoints.find(name, resume)
            if known is not None and restore is None:
                _same_run(known, text)
                raise WrongState(f"the slabs of run {name!r} are gone, and it has no durable checkpoint; begin another run",
                                 reason="RUN_LOST", run=name)
            if known is not None and known is self.open_run and (not there or known.state is RunState.RECOVERING):
                await self._abandon()
            self._check_idle()
            # What can be refused is refused before the run that is open loses its slabs.
            await self.mesh.join(config.loss.kl_coef > 0)
            await self.checkpoints.settled()
            if self.open_run is not None:
                self.open_run.state = RunState.CLOSED
                await self.journal.put_run(self.open_run)
                self.open_run = None
            run = Run(name, text, time.time()) if restore is None else restored_run(name, text, restore.manifest, known)
            self.runs[name] = run
            run.last_sequence = await self.journal.last_sequence(name)
            if config.replay:
                run.replay_iterations = await self.recordings.count(config.replay)
            await (self.journal.put_run(run) if restore is None else self.journal.rewind(run))
            await self._open(run, config, restore)
            for note in notes:
                self.log_of(run).emit(None, note)
            if restore is not None:
                self.log_of(run).emit(None, Note("info", "RUN_RESTORED", f"from {restore.path}: iteration "
                                                 f"{run.next_iteration} is next, snapshot {run.snapshot}"))
            return run

    async def _abandon(self) -> None:
        """Gives up what the open run has queued or under way: its slabs are gone, or it is taken back to a checkpoint."""
        if self._current is not None:
            task = self._current[1]
            task.cancel()
            await asyncio.wait([task])
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for job in list(self._jobs.values()):
            await self._drop(job)
        self.open_run.state = RunState.CLOSED
        await self.journal.put_run(self.open_run)
        self.open_run = None
        self._worker = asyncio.create_task(self._work(), name="iterations")

    def _check_idle(self) -> None:
        """Raises WrongState while iterations of the open run are queued or running."""
        busy = ", ".join(str(key) for key in self._jobs)
        if self.open_run is not None and self.open_run.state is RunState.RECOVERING:
            busy = busy or "an update that is rolled forward"
        if busy:
            raise WrongState(f"run {self.open_run.name!r} is busy with {busy}; wait for it or cancel it",
                             reason="RUN_BUSY", run=self.open_run.name)

    async def _open(self, run: Run, config: RunConfig, restore: Checkpoint | None) -> None:
        try:
            await self.mesh.open_run(run, config.phase_timeout_s, config.loss.kl_coef > 0, restore)
        except BaseException:
            run.state = RunState.FAILED
            await self.journal.put_run(run)
            raise
        run.state = RunState.ACTIVE
        await self.journal.put_run(run)
        self.open_run = run

    # Iterations

    async def submit(self, run_name: str, rows: Sequence[PromptRow], request_id: str, *, validation: bool
                     ) -> tuple[Iteration, int]:
        """Checks and prepares prompts, journals and enqueues the iteration. Returns it and the last event before it.

        A run that replays takes no rows: they are those of the recorded iteration.
        """
        return await self._own(self._submit(run_name, rows, request_id or new_id("request"), validation))

    async def _submit(self, run_name: str, rows: Sequence[PromptRow], request_id: str, validation: bool
                      ) -> tuple[Iteration, int]:
        async with self._changing:
            run = self.run(run_name)
            known = await self.journal.iteration_by_request(run.name, request_id)
            if known is not None:
                return self._live(known), self.last_sequence(run)
            self._check_takes_iterations(run)
            replayed = "" if validation else self.config_of(run).replay
            if bool(rows) == bool(replayed):
                raise BadInput("an iteration needs at least one prompt" if not replayed else
                               f"run {run.name!r} replays {replayed!r}: its prompts are the recorded ones, hand in none",
                               reason="NO_PROMPTS" if not replayed else "REPLAY_HAS_PROMPTS")
            if replayed:
                return await self._accept_replay(run, replayed, request_id)
            if not self.rewards.all():
                raise WrongState("no reward is registered; register one with `rollplex reward add NAME ADDRESS`",
                                 reason="NO_REWARD")
            return await self._accept(run, rows, request_id, validation)

    def _check_takes_iterations(self, run: Run) -> None:
        if run is self.open_run and run.state is RunState.RECOVERING:
            raise Unavailable(f"run {run.name!r} is recovering: an update was interrupted and is being rolled forward; try "
                              "again in a moment", reason="RUN_RECOVERING", run=run.name)
        if run is not self.open_run or run.state is not RunState.ACTIVE:
            raise WrongState(f"run {run.name!r} is {run.state.value}; iterations need an active run",
                             reason="RUN_NOT_ACTIVE", run=run.name, state=run.state.value)

    async def _accept_replay(self, run: Run, replayed: str, request_id: str) -> tuple[Iteration, int]:
        """The first recorded iteration that is not replayed yet."""
        past = [self._live(item) for item in await self.journal.iterations(run.name)]
        recorded = await self.recordings.next_after(past, replayed)
        rows = [row_from_json(value) for value in await self.recordings.prompts(recorded)]
        return await self._accept(run, rows, request_id, False, recorded.iteration)

    async def _accept(self, run: Run, rows: Sequence[PromptRow], request_id: str, validation: bool, recorded: int = -1
                      ) -> tuple[Iteration, int]:
        number = run.next_validation if validation else run.next_iteration
        key = IterationKey(run.name, number, validation)
        count = 1 if validation else self.config_of(run).sampling.samples_per_group
        prompts = await self.intake.prepare(key, rows, run.prompts_consumed, count)
        iteration = Iteration(key, request_id, time.time(), run.prompts_consumed, recorded=recorded)
        counted = dataclasses.replace(
            run, next_validation=run.next_validation + validation, next_iteration=run.next_iteration + (not validation),
            prompts_consumed=run.prompts_consumed + (0 if validation else len(rows)))
        try:
            await self.journal.add_iteration(counted, iteration, [row_to_json(row) for row in rows])
        except BaseException:
            await self.intake.release(prompts)
            raise
        run.next_validation, run.next_iteration = counted.next_validation, counted.next_iteration
        run.prompts_consumed = counted.prompts_consumed
        before = self.last_sequence(run)
        self._emit_state(iteration)
        self._enqueue(Job(iteration, prompts))
        return iteration, before

    def _enqueue(self, job: Job) -> None:
        self._jobs[job.iteration.key] = job
        self._queue.put_nowait(job)

    def _live(self, iteration: Iteration) -> Iteration:
        job = self._jobs.get(iteration.key)
        return job.iteration if job else iteration

    async def iteration(self, key: IterationKey) -> Iteration:
        self.run(key.run)
        found = await self.journal.iteration(key)
        if found is None:
            raise NotFound(f"no {key}", reason="ITERATION_NOT_FOUND")
        return self._live(found)

    async def samples(self, key: IterationKey) -> list[SampleRecord]:
        await self.iteration(key)
        return await self.journal.samples(key)

    async def cancel(self, key: IterationKey) -> IterationState:
        """Ends a queued or running iteration; WrongState once an update of it has begun. Returns when it has ended."""
        iteration = await self.iteration(key)
        if iteration.state.ended:
            return iteration.state
        if self._current is not None and self._current[0].key == key:
            work, task = self._current
            # Cancelled before its first step, a task ends without a word.
            await asyncio.sleep(0)
            if work.update_begun or work.updates_published:
                raise WrongState(f"{key} is in UPDATE; it only goes forward", reason="UPDATE_BEGUN")
            if not work.ending:
                task.cancel()
            await asyncio.wait([task])
            return iteration.state
        job = self._jobs.get(key)
        if job is not None and job.kept is not None:
            # It goes on in a moment, before all others, and is then ended as one that runs.
            await asyncio.sleep(CANCEL_PAUSE_S)
            return await self.cancel(key)
        if self._jobs.pop(key, None) is not None:
            await self._own(self._drop(job))
        return iteration.state

    async def _drop(self, job: Job) -> None:
        await self._end(job.iteration, IterationState.CANCELLED, None)
        await self.intake.release(job.prompts)

    async def watch(self, run_name: str, after_sequence: int) -> AsyncIterator[Event]:
        async for event in self.log_of(self.run(run_name)).watch(after_sequence):
            yield event

    async def export(self, run_name: str, path: str) -> CheckpointResult:
        """Writes the current snapshot; between iterations only."""
        return await self._own(self._export(run_name, path))

    async def _export(self, run_name: str, path: str) -> CheckpointResult:
        async with self._changing:
            run = self.run(run_name)
            if run is not self.open_run:
                raise WrongState(f"run {run_name!r} is not open; its weights are gone", reason="RUN_CLOSED")
            self._check_idle()
            config = self.config_of(run)
            await self.mesh.ensure_ready(run, config.phase_timeout_s, config.loss.kl_coef > 0)
            outcomes = await self.mesh.trainer.command(orders.export_checkpoint(path),
                                                       Place(run.name, -1, run.snapshot, config.phase_timeout_s))
            return outcomes[0].value

    # The queue

    async def _work(self) -> None:
        await self._finish_orphaned_update()
        while True:
            job = await self._queue.get()
            if self._jobs.get(job.iteration.key) is not job:
                continue  # cancelled while it waited
            work = self._work_of(job, self.run(job.iteration.key.run))
            if job.kept is not None:
                take_up(work, job.kept)
            task = asyncio.create_task(self._run_job(job, work), name=str(job.iteration.key))
            self._current = work, task
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            if not task.cancelled() and task.exception() is not None:
                log.error("%s ended badly", job.iteration.key, exc_info=task.exception())

    async def _run_job(self, job: Job, work: IterationWork) -> None:
        try:
            error: RollplexError | None = None
            try:
                await self._execute(job, work)
            except asyncio.CancelledError:
                if self._closing:
                    raise
                asyncio.current_task().uncancel()
                error = Aborted(f"{work.key} was cancelled", reason="CANCELLED")
            except Exception as failure:  # noqa: BLE001 - becomes the iteration's error, which clients see
                error = as_domain_error(failure)
                log.warning("%s failed: %s", work.key, error, exc_info=failure if error.reason == "INTERNAL" else None)
            work.ending = True
            await self._own(self._conclude(job.iteration, work, error))
        finally:
            self._current = None
            self._jobs.pop(job.iteration.key, None)
            await asyncio.shield(self.intake.release(job.prompts))

    async def _execute(self, job: Job, work: IterationWork) -> None:
        iteration = job.iteration
        if job.kept is None:
            iteration.snapshot = work.run.snapshot
        iteration.state = IterationState.RUNNING
        await self.journal.put_iteration(iteration)
        self._emit_state(iteration)
        if job.kept is not None:
            await finish_update(work, job.kept)
        await (run_validation if iteration.key.validation else run_iteration)(work)

    async def _conclude(self, iteration: Iteration, work: IterationWork, error: RollplexError | None) -> None:
        if error is not None:
            await self._clean_up(work.run, work.config, work.emit)
        iteration.metrics = work.metrics
        done = error is None or (work.batch_count > 0 and work.updates_published == work.batch_count)
        if done and RunCheckpoints.due(work.key, work.config):
            await self.checkpoints.begin(work.run, work.config, work.key, iteration.first_ordinal + len(work.prompts),
                                         lambda note: self.log_of(work.run).emit(work.key, note))
        await self._end(iteration, *_verdict(done, work.updates_published, error))

    def _work_of(self, job: Job, run: Run) -> IterationWork:
        key, event_log, registrations = job.iteration.key, self.log_of(run), self.rewards.all()
        config, recorded = self.config_of(run), job.iteration.recorded

        def emit(body: EventBody) -> None:
            event_log.emit(key, body)

        def samples() -> Awaitable[list[SampleRecord]]:
            return self.recordings.samples_for(key, IterationKey(config.replay, recorded))

        return IterationWork(
            key=key, run=run, config=config, prompts=job.prompts, mesh=self.mesh, journal=self.journal, intake=self.intake,
            emit=emit, recorded=None if recorded < 0 else samples,
            desk_of=lambda on_scored: RewardDesk(registrations, key.run, key.iteration, on_scored,
                                                  lambda message: emit(Note("warning", "REWARD_TIMEOUT", message))))

    async def _clean_up(self, run: Run, config: RunConfig, emit: Callable[[Note], None]) -> None:
        """After an iteration that broke off: engines drop its boundaries and gradients. What is down has none left."""
        groups = self.mesh.used_groups(config.loss.kl_coef > 0)
        place = Place(run.name, -1, run.snapshot, config.phase_timeout_s)

        async def attempt(step: Coroutine[Any, Any, object]) -> None:
            try:
                await step
            except RollplexError as error:
                emit(Note("warning", error.reason, f"after the iteration broke off: {error}"))

        async def clear(group: EngineGroup) -> None:
            await self.mesh.ready(group, run, config.phase_timeout_s)
            await self.mesh.quiesce([group], place, leave_snapshot=False)
            if group is self.mesh.trainer:
                await self.mesh.drop_gradients(run, config.phase_timeout_s)

        await attempt(self.mesh.register_snapshot(run))
        await asyncio.gather(*(attempt(clear(group)) for group in groups))
        await attempt(self.mesh.enter_phase(run.name, -1, Phase.IDLE))

    async def _end(self, iteration: Iteration, state: IterationState, error: RollplexError | None) -> None:
        iteration.state, iteration.end_time_s = state, time.time()
        if error is not None:
            iteration.error = ErrorRecord(type(error).__name__, error.reason, str(error), error.metadata)
        await self.journal.put_iteration(iteration)
        # Whoever sees the end may ask for what needs an idle run.
        self._jobs.pop(iteration.key, None)
        self._emit_state(iteration)
        await self.log_of(self.run(iteration.key.run)).flush()

    def _emit_state(self, iteration: Iteration) -> None:
        self.log_of(self.run(iteration.key.run)).emit(iteration.key, StateChange(dataclasses.asdict(iteration)))

    @property
    def current_phase(self) -> Phase:
        return self._current[0].phase if self._current else Phase.IDLE


def _verdict(done: bool, updates_published: int, error: RollplexError | None
             ) -> tuple[IterationState, RollplexError | None]:
    """What an iteration ended as. Weights that have moved are never called unmoved."""
    if done:
        return IterationState.DONE, None
    if updates_published:
        return IterationState.FAILED, WrongState(
            f"the iteration broke off after {updates_published} of its updates; they stay, do not submit it again: {error}",
            reason="UPDATED_IN_PART")
    if error is not None and error.reason == "CANCELLED":
        return IterationState.CANCELLED, None
    return IterationState.FAILED, error


def _same_run(known: Run, config_text: str) -> Run:
    """The run, for a client that creates it again."""
    if known.config_json != config_text:
        raise AlreadyExists(f"run {known.name!r} exists with another config", reason="RUN_EXISTS", run=known.name)
    if known.state is RunState.CLOSED:
        raise WrongState(f"run {known.name!r} is closed; its weights went when the next run was opened",
                         reason="RUN_CLOSED", run=known.name)
    return known
