"""The coordinator's work: runs, the queue of iterations, cancellation, recovery. No grpc, no proto."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollplex.coordinator import orders
from rollplex.coordinator.events import EventLog
from rollplex.coordinator.intake import Intake, Prompt
from rollplex.coordinator.iteration import IterationWork, run_iteration, run_validation
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import Place
from rollplex.coordinator.recordings import Recordings
from rollplex.coordinator.records import (
    ErrorRecord,
    Event,
    Iteration,
    IterationKey,
    IterationState,
    Note,
    Run,
    RunState,
    SampleRecord,
    StateChange,
)
from rollplex.coordinator.rewards import RewardBook, RewardDesk
from rollplex.coordinator.update import roll_forward
from rollplex.core.config import RunConfig
from rollplex.core.errors import AlreadyExists, BadInput, NotFound, RollplexError, WrongState, as_domain_error
from rollplex.core.ids import check_run_name, new_id
from rollplex.core.phases import Phase
from rollplex.core.strict import parse, to_plain
from rollplex.core.work import CheckpointResult
from rollplex.data.rows import MediaRef, PromptRow

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Job:
    """A queued iteration with its prepared prompts."""

    iteration: Iteration
    prompts: list[Prompt]


class Coordinator:
    """One mesh's runs. All methods run on the event loop."""

    def __init__(self, mesh: Mesh, journal: Journal, intake: Intake, rewards: RewardBook, recordings: Recordings) -> None:
        self.mesh, self.journal, self.intake, self.rewards = mesh, journal, intake, rewards
        self.recordings = recordings
        self.runs: dict[str, Run] = {}
        self.open_run: Run | None = None
        self.phase = Phase.IDLE
        self._logs: dict[str, EventLog] = {}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._jobs: dict[IterationKey, Job] = {}
        self._current: tuple[IterationWork, asyncio.Task[None]] | None = None
        self._submitting = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Reads the journal. What was running when the last coordinator ended has failed; what was queued goes on."""
        await self.rewards.load()
        for run in await self.journal.runs():
            self.runs[run.name] = run
            run.last_sequence = await self.journal.last_sequence(run.name)
            if run.state in (RunState.ACTIVE, RunState.RECOVERING) and self.open_run is None:
                self.open_run = run
            elif run.state is RunState.OPENING:
                run.state = RunState.FAILED
                await self.journal.put_run(run)
        await self.intake.release_leftovers()
        if self.open_run is not None:
            await self._take_over(self.open_run)
        self._worker = asyncio.create_task(self._work(), name="iterations")

    async def _take_over(self, run: Run) -> None:
        update = await self.journal.open_update(run.name)
        if update is not None:
            run.state = RunState.RECOVERING
            await self.journal.put_run(run)
            config = self.config_of(run)
            await roll_forward(self.mesh, self.journal, run, config, update)
            run.state = RunState.ACTIVE
            await self.journal.put_run(run)
        for iteration in await self.journal.iterations(run.name):
            if iteration.state is IterationState.RUNNING:
                error = WrongState("the coordinator was restarted while the iteration ran; submit it again",
                                   reason="COORDINATOR_RESTARTED")
                await self._end(iteration, IterationState.FAILED, error)
            elif iteration.state is IterationState.QUEUED:
                await self._prepare_again(run, iteration)

    async def _prepare_again(self, run: Run, iteration: Iteration) -> None:
        rows = [_row_from_json(value) for value in await self.journal.prompts(iteration.key)]
        count = 1 if iteration.key.validation else self.config_of(run).sampling.samples_per_group
        try:
            prompts = await self.intake.prepare(iteration.key, rows, iteration.first_ordinal, count)
        except RollplexError as error:
            await self._end(iteration, IterationState.FAILED, error)
            return
        self._enqueue(Job(iteration, prompts))

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
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
        return self.log_of(run).last_sequence

    async def create_run(self, name: str, config_json: str) -> Run:
        """Opens a run from the checkpoint; see CoordinatorService.CreateRun."""
        check_run_name(name)
        config = await self._read_config(config_json)
        text = json.dumps(to_plain(config), sort_keys=True)
        async with self._submitting:
            known = self.runs.get(name)
            if known is not None and known.state is not RunState.FAILED:
                if known.config_json != text:
                    raise AlreadyExists(f"run {name!r} exists with another config", reason="RUN_EXISTS", run=name)
                if known.state is RunState.CLOSED:
                    raise WrongState(f"run {name!r} is closed; its weights went when the next run was opened",
                                     reason="RUN_CLOSED", run=name)
                return known
            await self._close_open_run()
            run = self.runs[name] = Run(name, text, time.time())
            run.last_sequence = await self.journal.last_sequence(name)
            if config.replay:
                run.replay_iterations = await self.recordings.count(config.replay)
            await self.journal.put_run(run)
            await self._open(run, config)
            return run

    async def _read_config(self, config_json: str) -> RunConfig:
        """Missing options are the defaults, or the recorded run's in a replay."""
        try:
            given = json.loads(config_json or "{}")
        except json.JSONDecodeError as error:
            raise BadInput(f"config_json is no JSON: {error}", reason="BAD_CONFIG") from error
        if isinstance(given, dict) and given.get("replay"):
            given = await self.recordings.config(str(given["replay"]), given)
        config = parse(RunConfig, given)
        self._check_schedule(config)
        return config

    def _check_schedule(self, config: RunConfig) -> None:
        own = self.mesh.topology.own_replicas > 0
        if own != (config.schedule == "disaggregated"):
            raise BadInput(f"schedule {config.schedule!r} on a mesh with mesh.own_replicas = {self.mesh.topology.own_replicas}: "
                           "`disaggregated` needs rollout on devices of its own, the other schedules share the trainer's",
                           reason="BAD_SCHEDULE", schedule=config.schedule)

    async def _close_open_run(self) -> None:
        if self.open_run is None:
            return
        if self._jobs:
            busy = ", ".join(str(key) for key in self._jobs)
            raise WrongState(f"run {self.open_run.name!r} is busy with {busy}; wait for it or cancel it",
                             reason="RUN_BUSY", run=self.open_run.name)
        self.open_run.state = RunState.CLOSED
        await self.journal.put_run(self.open_run)
        self.open_run = None

    async def _open(self, run: Run, config: RunConfig) -> None:
        try:
            await self.mesh.open_run(run, config.phase_timeout_s, config.loss.kl_coef > 0)
        except RollplexError:
            run.state = RunState.FAILED
            await self.journal.put_run(run)
            raise
        run.state = RunState.ACTIVE
        await self.journal.put_run(run)
        self.open_run = run

    # Iterations

    async def submit(self, run_name: str, rows: Sequence[PromptRow], request_id: str, *, validation: bool
                     ) -> tuple[Iteration, int]:
        """Checks and prepares the prompts, journals the iteration, enqueues it. Returns it and the last event before it.

        A run that replays takes no rows: they are those of the recorded iteration.
        """
        async with self._submitting:
            run = self.run(run_name)
            request_id = request_id or new_id("request")
            known = await self.journal.iteration_by_request(run.name, request_id)
            if known is not None:
                return self._live(known), self.last_sequence(run)
            if run is not self.open_run or run.state is not RunState.ACTIVE:
                raise WrongState(f"run {run.name!r} is {run.state.value}; iterations need an active run",
                                 reason="RUN_NOT_ACTIVE", run=run.name, state=run.state.value)
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

    async def _accept_replay(self, run: Run, replayed: str, request_id: str) -> tuple[Iteration, int]:
        """The first recorded iteration that is not replayed yet."""
        past = [self._live(item) for item in await self.journal.iterations(run.name) if not item.key.validation]
        position = sum(item.state not in (IterationState.FAILED, IterationState.CANCELLED) for item in past)
        recorded = await self.recordings.iteration(replayed, position)
        rows = [_row_from_json(value) for value in await self.recordings.prompts(recorded)]
        return await self._accept(run, rows, request_id, False, recorded.iteration)

    async def _accept(self, run: Run, rows: Sequence[PromptRow], request_id: str, validation: bool, recorded: int = -1
                      ) -> tuple[Iteration, int]:
        number = run.next_validation if validation else run.next_iteration
        key = IterationKey(run.name, number, validation)
        count = 1 if validation else self.config_of(run).sampling.samples_per_group
        prompts = await self.intake.prepare(key, rows, run.prompts_consumed, count)
        iteration = Iteration(key, request_id, time.time(), run.prompts_consumed, recorded=recorded)
        if validation:
            run.next_validation += 1
        else:
            run.next_iteration += 1
            run.prompts_consumed += len(rows)
        await self.journal.add_iteration(run, iteration, [_row_to_json(row) for row in rows])
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
        """Ends a queued or running iteration; WrongState once its update has begun."""
        iteration = await self.iteration(key)
        if iteration.state.ended:
            return iteration.state
        if self._current is not None and self._current[0].key == key:
            work, task = self._current
            if work.update_begun:
                raise WrongState(f"{key} is in UPDATE; it only goes forward", reason="UPDATE_BEGUN")
            task.cancel()
            await asyncio.wait([task])
        else:
            iteration.state = IterationState.CANCELLED
        return iteration.state

    async def watch(self, run_name: str, after_sequence: int) -> AsyncIterator[Event]:
        async for event in self.log_of(self.run(run_name)).watch(after_sequence):
            yield event

    async def export(self, run_name: str, path: str) -> CheckpointResult:
        """Writes the current snapshot; between iterations only."""
        run = self.run(run_name)
        if run is not self.open_run or self._jobs:
            raise WrongState(f"run {run_name!r} must be open and idle to be exported", reason="RUN_BUSY")
        config = self.config_of(run)
        await self.mesh.ensure_ready(run, config.phase_timeout_s, config.loss.kl_coef > 0)
        outcomes = await self.mesh.trainer.command(orders.export_checkpoint(path),
                                           Place(run.name, -1, run.snapshot, config.phase_timeout_s))
        return outcomes[0].value

    # The queue

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            task = asyncio.create_task(self._run_job(job), name=str(job.iteration.key))
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            if not task.cancelled() and task.exception() is not None:
                log.error("%s ended badly", job.iteration.key, exc_info=task.exception())

    async def _run_job(self, job: Job) -> None:
        iteration = job.iteration
        try:
            if iteration.state is IterationState.CANCELLED:
                await self._end(iteration, IterationState.CANCELLED, None)
                return
            await self._execute(job)
        finally:
            self._current = None
            self._jobs.pop(iteration.key, None)
            await asyncio.shield(self.intake.release(job.prompts))

    async def _execute(self, job: Job) -> None:
        iteration, run = job.iteration, self.run(job.iteration.key.run)
        work = self._work_of(job, run)
        self._current = (work, asyncio.current_task())
        iteration.state, iteration.snapshot = IterationState.RUNNING, run.snapshot
        await self.journal.put_iteration(iteration)
        self._emit_state(iteration)
        try:
            await (run_validation if iteration.key.validation else run_iteration)(work)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
            await self._clean_up(work)
            await self._end(iteration, IterationState.CANCELLED, None)
        except Exception as error:  # noqa: BLE001 - becomes the iteration's error, which clients see
            domain_error = as_domain_error(error)
            log.warning("%s failed: %s", iteration.key, domain_error,
                        exc_info=error if domain_error.reason == "INTERNAL" else None)
            await self._clean_up(work)
            await self._end(iteration, IterationState.FAILED, domain_error)
        else:
            iteration.metrics = work.metrics
            await self._end(iteration, IterationState.DONE, None)

    def _work_of(self, job: Job, run: Run) -> IterationWork:
        key, event_log, registrations = job.iteration.key, self.log_of(run), self.rewards.all()
        config, recorded = self.config_of(run), job.iteration.recorded
        return IterationWork(
            key=key, run=run, config=config, prompts=job.prompts, mesh=self.mesh, journal=self.journal,
            intake=self.intake, emit=lambda body: event_log.emit(key, body),
            recorded=None if recorded < 0 else lambda: self.recordings.samples(IterationKey(config.replay, recorded)),
            desk_of=lambda on_scored: RewardDesk(registrations, key.run, key.iteration, on_scored))

    async def _clean_up(self, work: IterationWork) -> None:
        """After an iteration that broke off: engines drop its boundaries and gradients. What is down is left for the next."""
        if work.update_begun:
            work.run.state = RunState.RECOVERING
            await self.journal.put_run(work.run)
            return
        config = work.config
        try:
            await self.mesh.ensure_ready(work.run, config.phase_timeout_s, config.loss.kl_coef > 0)
            await self.mesh.quiesce(self.mesh.used_groups(config.loss.kl_coef > 0), work.place(), leave_snapshot=False)
            await self.mesh.drop_gradients(work.run, config.phase_timeout_s)
            await self.mesh.enter_phase(work.run.name, -1, Phase.IDLE)
        except RollplexError as error:
            work.emit(Note("warning", error.reason, f"after the iteration broke off: {error}"))

    async def _end(self, iteration: Iteration, state: IterationState, error: RollplexError | None) -> None:
        iteration.state, iteration.end_time_s = state, time.time()
        if error is not None:
            iteration.error = ErrorRecord(type(error).__name__, error.reason, str(error), error.metadata)
        await self.journal.put_iteration(iteration)
        self._emit_state(iteration)
        await self.log_of(self.run(iteration.key.run)).flush()

    def _emit_state(self, iteration: Iteration) -> None:
        self.log_of(self.run(iteration.key.run)).emit(iteration.key, StateChange(dataclasses.asdict(iteration)))

    @property
    def current_phase(self) -> Phase:
        return self._current[0].phase if self._current else Phase.IDLE


def _row_to_json(row: PromptRow) -> dict[str, Any]:
    return dataclasses.asdict(row)


def _row_from_json(value: dict[str, Any]) -> PromptRow:
    media = tuple(MediaRef(**{**item, "frames": tuple(item["frames"])}) for item in value["media"])
    return PromptRow(**{**value, "media": media})
