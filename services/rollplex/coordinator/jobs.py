"""The queue of iterations, and the one that runs: carried out, cancelled, concluded. No grpc, no proto."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable

from rollplex.coordinator.changes import Changes
from rollplex.coordinator.checkpoints import RunCheckpoints
from rollplex.coordinator.ending import clean_up, verdict
from rollplex.coordinator.intake import Intake
from rollplex.coordinator.iteration import run_iteration, run_validation
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.recordings import Recordings
from rollplex.coordinator.records import (
    ErrorRecord,
    EventBody,
    Iteration,
    IterationKey,
    IterationState,
    Note,
    Run,
    SampleRecord,
)
from rollplex.coordinator.rewards import RewardBook, RewardDesk
from rollplex.coordinator.runs import Runs, config_of
from rollplex.coordinator.takeover import Job, finish_update, take_up
from rollplex.coordinator.update import roll_forward
from rollplex.coordinator.work import IterationWork
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import Aborted, RollplexError, WrongState, as_domain_error
from rollplex.core.phases import Phase

log = logging.getLogger(__name__)

CANCEL_PAUSE_S = 0.02


class Jobs:
    """`start` and `stop` are about the worker; what is queued stays queued."""

    def __init__(self, mesh: Mesh, journal: Journal, intake: Intake, rewards: RewardBook, recordings: Recordings,
                 checkpoints: RunCheckpoints, runs: Runs, changes: Changes) -> None:
        self._mesh, self._journal, self._intake, self._rewards = mesh, journal, intake, rewards
        self._recordings, self._checkpoints, self._runs, self._changes = recordings, checkpoints, runs, changes
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._waiting: dict[IterationKey, Job] = {}
        """The one that runs included."""
        self._current: tuple[IterationWork, asyncio.Task[None]] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        self._worker = asyncio.create_task(self._work(), name="iterations")

    async def stop(self) -> None:
        """The iteration that runs is left to the next coordinator."""
        self._closing = True
        await self._end_worker()

    async def abandon(self) -> None:
        """Cancels all that is queued or under way, and stops the worker."""
        if self._current is not None:
            task = self._current[1]
            task.cancel()
            await asyncio.wait([task])
        await self._end_worker()
        for job in list(self._waiting.values()):
            await self._drop(job)

    async def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    @property
    def keys(self) -> list[IterationKey]:
        """Of what is queued or running."""
        return list(self._waiting)

    @property
    def phase(self) -> Phase:
        return self._current[0].phase if self._current else Phase.IDLE

    def add(self, job: Job) -> None:
        self._waiting[job.iteration.key] = job
        self._queue.put_nowait(job)

    def live(self, iteration: Iteration) -> Iteration:
        """As it is in here, where it is."""
        job = self._waiting.get(iteration.key)
        return job.iteration if job else iteration

    async def cancel(self, iteration: Iteration) -> IterationState:
        """Ends a queued or running iteration; WrongState once an update of it has begun. Returns when it has ended."""
        key = iteration.key
        while not iteration.state.ended:
            if self._current is not None and self._current[0].key == key:
                await self._cancel_current()
                break
            job = self._waiting.get(key)
            if job is None or job.kept is None:
                if self._waiting.pop(key, None) is not None:
                    await self._changes.make(self._drop(job))
                break
            # It goes on in a moment, before all others, and is then ended as one that runs.
            await asyncio.sleep(CANCEL_PAUSE_S)
        return iteration.state

    async def _cancel_current(self) -> None:
        work, task = self._current
        # Cancelled before its first step, a task ends without a word.
        await asyncio.sleep(0)
        if work.update_begun or work.updates_published:
            raise WrongState(f"{work.key} is in UPDATE; it only goes forward", reason="UPDATE_BEGUN")
        if not work.ending:
            task.cancel()
        await asyncio.wait([task])

    async def _drop(self, job: Job) -> None:
        await self.end(job.iteration, IterationState.CANCELLED, None)
        await self._intake.release(job.prompts)

    async def end(self, iteration: Iteration, state: IterationState, error: RollplexError | None) -> None:
        """Journals the outcome, then tells it."""
        iteration.state, iteration.end_time_s = state, time.time()
        if error is not None:
            iteration.error = ErrorRecord(type(error).__name__, error.reason, str(error), error.metadata)
        await self._journal.put_iteration(iteration)
        crash_point("coordinator.iteration.ended")
        # Whoever sees the end may ask for what needs an idle run.
        self._waiting.pop(iteration.key, None)
        self._runs.emit_state(iteration)
        await self._runs.log_of(self._runs.get(iteration.key.run)).flush()

    # The worker

    async def _work(self) -> None:
        await self._finish_orphaned_update()
        while True:
            job = await self._queue.get()
            if self._waiting.get(job.iteration.key) is not job:
                continue  # cancelled while it waited
            work = self._work_of(job, self._runs.get(job.iteration.key.run))
            if job.kept is not None:
                take_up(work, job.kept)
            task = asyncio.create_task(self._run(job, work), name=str(job.iteration.key))
            self._current = work, task
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            if not task.cancelled() and task.exception() is not None:
                log.error("%s ended badly", job.iteration.key, exc_info=task.exception())

    async def _finish_orphaned_update(self) -> None:
        """Rolls forward an update whose iteration cannot go on."""
        run = self._runs.open
        record = await self._journal.open_update(run.name) if run is not None else None
        if record is not None and not any(job.kept and job.kept.open_update for job in self._waiting.values()):
            await roll_forward(self._mesh, self._journal, run, config_of(run), record,
                               lambda note: self._runs.log_of(run).emit(None, note))

    async def _run(self, job: Job, work: IterationWork) -> None:
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
            await self._changes.make(self._conclude(job.iteration, work, error))
        finally:
            self._current = None
            self._waiting.pop(job.iteration.key, None)
            await asyncio.shield(self._intake.release(job.prompts))

    async def _execute(self, job: Job, work: IterationWork) -> None:
        iteration = job.iteration
        if job.kept is None:
            iteration.snapshot = work.run.snapshot
        iteration.state = IterationState.RUNNING
        await self._journal.put_iteration(iteration)
        crash_point("coordinator.iteration.running")
        self._runs.emit_state(iteration)
        if job.kept is not None:
            await finish_update(work, job.kept)
        await (run_validation if iteration.key.validation else run_iteration)(work)

    async def _conclude(self, iteration: Iteration, work: IterationWork, error: RollplexError | None) -> None:
        if error is not None:
            await clean_up(self._mesh, work.run, work.config, work.emit)
        crash_point("coordinator.iteration.concluding")
        iteration.metrics = work.metrics
        done = error is None or (work.batch_count > 0 and work.updates_published == work.batch_count)
        if done and RunCheckpoints.due(work.key, work.config):
            await self._checkpoints.begin(work.run, work.config, work.key, iteration.first_ordinal + len(work.prompts),
                                          lambda note: self._runs.log_of(work.run).emit(work.key, note))
        await self.end(iteration, *verdict(done, work.updates_published, error))

    def _work_of(self, job: Job, run: Run) -> IterationWork:
        key, event_log, registrations = job.iteration.key, self._runs.log_of(run), self._rewards.all()
        config, recorded = config_of(run), job.iteration.recorded

        def emit(body: EventBody) -> None:
            event_log.emit(key, body)

        def samples() -> Awaitable[list[SampleRecord]]:
            return self._recordings.samples_for(key, IterationKey(config.replay, recorded))

        return IterationWork(
            key=key, run=run, config=config, prompts=job.prompts, mesh=self._mesh, journal=self._journal,
            intake=self._intake, emit=emit, recorded=None if recorded < 0 else samples,
            desk_of=lambda on_scored: RewardDesk(registrations, key.run, key.iteration, on_scored,
                                                  lambda message: emit(Note("warning", "REWARD_TIMEOUT", message))))
