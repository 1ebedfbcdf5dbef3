"""What clients ask of the coordinator: runs, iterations, cancellation, export; and taking over from an earlier one. No grpc,
no proto."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence

from rollplex.coordinator import orders
from rollplex.coordinator.changes import Changes
from rollplex.coordinator.checkpoints import AUTO, FRESH, RunCheckpoints, restored_run
from rollplex.coordinator.ending import verdict
from rollplex.coordinator.intake import Intake
from rollplex.coordinator.jobs import Jobs
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import Place
from rollplex.coordinator.recordings import Recordings
from rollplex.coordinator.records import (
    Event,
    Iteration,
    IterationKey,
    IterationState,
    Note,
    Run,
    RunState,
    SampleRecord,
    row_from_json,
    row_to_json,
)
from rollplex.coordinator.recovery import LOSSES
from rollplex.coordinator.rewards import RewardBook
from rollplex.coordinator.run_config import read_config
from rollplex.coordinator.runs import Runs, check_same, config_of
from rollplex.coordinator.takeover import Job, read_kept
from rollplex.core.checkpoints import Checkpoint
from rollplex.core.config import RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, NotFound, RollplexError, Unavailable, WrongState
from rollplex.core.ids import check_run_name, new_id
from rollplex.core.phases import Phase
from rollplex.core.strict import to_plain
from rollplex.core.work import CheckpointResult
from rollplex.data.rows import PromptRow

PREPARE_PAUSE_S = 0.5
"""Where the broker is away as a coordinator takes over."""


class Coordinator:
    """One mesh's runs. All methods run on the event loop."""

    def __init__(self, mesh: Mesh, journal: Journal, intake: Intake, rewards: RewardBook, recordings: Recordings,
                 checkpoints: RunCheckpoints) -> None:
        self.mesh, self.journal, self.intake, self.rewards = mesh, journal, intake, rewards
        self.recordings, self.checkpoints = recordings, checkpoints
        self.runs, self._changes = Runs(journal), Changes()
        self._jobs = Jobs(mesh, journal, intake, rewards, recordings, checkpoints, self.runs, self._changes)
        self._changing = asyncio.Lock()

    # Life

    async def start(self) -> None:
        """Reads the journal and starts the queue. What an earlier coordinator was in goes on first, in the background."""
        await self.rewards.load()
        await self.intake.release_leftovers()
        await self.runs.load()
        crash_point("coordinator.restart.journal_read")
        for run in self.runs:
            await self.runs.tell_again(run)
        if self.runs.open is not None:
            await self._take_over(self.runs.open)
        self._jobs.start()

    async def _take_over(self, run: Run) -> None:
        if await self.journal.open_update(run.name) is not None:
            run.state = RunState.RECOVERING
        waiting = [item for item in await self.journal.iterations(run.name) if not item.state.ended]
        for iteration in sorted(waiting, key=lambda item: item.state is not IterationState.RUNNING):
            await self._prepare_again(run, iteration)

    async def _prepare_again(self, run: Run, iteration: Iteration) -> None:
        rows = [row_from_json(value) for value in await self.journal.prompts(iteration.key)]
        config = config_of(run)
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
                await self._jobs.end(iteration, *verdict(done, updates, error))
                return
            self._jobs.add(Job(iteration, prompts, kept))
            return

    async def close(self) -> None:
        """Leaves the journal as it is: the next coordinator takes over from there."""
        self.journal.give_up_waiting()
        await self._jobs.stop()
        # An iteration that has just ended may wait for one.
        await self.checkpoints.close()
        await self._changes.settled()
        await self.runs.close()
        await self.mesh.close()
        await self.journal.close()

    # Runs

    async def create_run(self, name: str, config_json: str, resume: str = "") -> Run:
        """Opens a run from the model's checkpoint or a durable one; see CoordinatorService.CreateRun."""
        check_run_name(name)
        config = await read_config(config_json, self.recordings, self.mesh.topology)
        if config.replay and resume not in (*FRESH, AUTO):
            raise BadInput(f"run {name!r} is a replay: it starts where the recorded run did", reason="REPLAY_RESUMED")
        return await self._changes.make(self._create_run(name, config, "" if config.replay else resume))

    async def _create_run(self, name: str, config: RunConfig, resume: str) -> Run:
        text = json.dumps(to_plain(config), sort_keys=True)
        async with self._changing:
            known = self.runs.find(name)
            known = known if known is not None and known.state is not RunState.FAILED else None
            there = known is not None and known is self.runs.open and await self.mesh.holds(known)
            if known is not None and (resume in FRESH or (resume == AUTO and there)):
                return check_same(known, text)
            restore, notes = await self.checkpoints.find(name, resume)
            if known is not None and restore is None:
                check_same(known, text)
                raise WrongState(f"the slabs of run {name!r} are gone, and it has no durable checkpoint; begin another run",
                                 reason="RUN_LOST", run=name)
            if known is not None and known is self.runs.open and (not there or known.state is RunState.RECOVERING):
                # Its slabs are gone, or it is taken back to a checkpoint.
                await self._jobs.abandon()
                await self.runs.close_open()
                self._jobs.start()
            self._check_idle()
            # What can be refused is refused before the run that is open loses its slabs.
            await self.mesh.join(config.loss.kl_coef > 0)
            await self.checkpoints.settled()
            await self.runs.close_open()
            run = Run(name, text, time.time()) if restore is None else restored_run(name, text, restore.manifest, known)
            await self.runs.add(run)
            if config.replay:
                run.replay_iterations = await self.recordings.count(config.replay)
            await (self.journal.put_run(run) if restore is None else self.journal.rewind(run))
            await self._open(run, config, restore)
            for note in notes:
                self.runs.log_of(run).emit(None, note)
            if restore is not None:
                self.runs.log_of(run).emit(None, Note("info", "RUN_RESTORED", f"from {restore.path}: iteration "
                                                      f"{run.next_iteration} is next, snapshot {run.snapshot}"))
            return run

    def _check_idle(self) -> None:
        """Raises WrongState while iterations of the open run are queued or running."""
        run, busy = self.runs.open, ", ".join(map(str, self._jobs.keys))
        if run is not None and run.state is RunState.RECOVERING:
            busy = busy or "an update that is rolled forward"
        if busy:
            raise WrongState(f"run {run.name!r} is busy with {busy}; wait for it or cancel it", reason="RUN_BUSY", run=run.name)

    async def _open(self, run: Run, config: RunConfig, restore: Checkpoint | None) -> None:
        try:
            await self.mesh.open_run(run, config.phase_timeout_s, config.loss.kl_coef > 0, restore)
        except BaseException:
            run.state = RunState.FAILED
            await self.journal.put_run(run)
            raise
        await self.runs.opened(run)

    async def watch(self, run_name: str, after_sequence: int) -> AsyncIterator[Event]:
        async for event in self.runs.log_of(self.runs.get(run_name)).watch(after_sequence):
            yield event

    async def export(self, run_name: str, path: str) -> CheckpointResult:
        """Writes the current snapshot; between iterations only."""
        return await self._changes.make(self._export(run_name, path))

    async def _export(self, run_name: str, path: str) -> CheckpointResult:
        async with self._changing:
            run = self.runs.get(run_name)
            if run is not self.runs.open:
                raise WrongState(f"run {run_name!r} is not open; its weights are gone", reason="RUN_CLOSED")
            self._check_idle()
            config = config_of(run)
            await self.mesh.ensure_ready(run, config.phase_timeout_s, config.loss.kl_coef > 0)
            outcomes = await self.mesh.trainer.command(orders.export_checkpoint(path),
                                                       Place(run.name, -1, run.snapshot, config.phase_timeout_s))
            return outcomes[0].value

    # Iterations

    @property
    def current_phase(self) -> Phase:
        return self._jobs.phase

    async def iteration(self, key: IterationKey) -> Iteration:
        self.runs.get(key.run)
        found = await self.journal.iteration(key)
        if found is None:
            raise NotFound(f"no {key}", reason="ITERATION_NOT_FOUND")
        return self._jobs.live(found)

    async def samples(self, key: IterationKey) -> list[SampleRecord]:
        await self.iteration(key)
        return await self.journal.samples(key)

    async def cancel(self, key: IterationKey) -> IterationState:
        """Ends a queued or running iteration; WrongState once an update of it has begun. Returns when it has ended."""
        return await self._jobs.cancel(await self.iteration(key))

    async def submit(self, run_name: str, rows: Sequence[PromptRow], request_id: str, *, validation: bool
                     ) -> tuple[Iteration, int]:
        """Checks and prepares prompts, journals and enqueues the iteration. Returns it and the last event before it.

        A run that replays takes no rows: they are those of the recorded iteration.
        """
        return await self._changes.make(self._submit(run_name, rows, request_id or new_id("request"), validation))

    async def _submit(self, run_name: str, rows: Sequence[PromptRow], request_id: str, validation: bool
                      ) -> tuple[Iteration, int]:
        async with self._changing:
            run = self.runs.get(run_name)
            known = await self.journal.iteration_by_request(run.name, request_id)
            if known is not None:
                return self._jobs.live(known), await self._before(run, known.key)
            self._check_takes_iterations(run)
            replayed = "" if validation else config_of(run).replay
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

    async def _before(self, run: Run, key: IterationKey) -> int:
        """The last event before the iteration's first, although it may have ended meanwhile."""
        await self.runs.log_of(run).flush()
        queued_at = await self.journal.queued_at(key)
        return queued_at - 1 if queued_at else self.runs.last_sequence(run)

    def _check_takes_iterations(self, run: Run) -> None:
        if run is self.runs.open and run.state is RunState.RECOVERING:
            raise Unavailable(f"run {run.name!r} is recovering: an update was interrupted and is being rolled forward; try "
                              "again in a moment", reason="RUN_RECOVERING", run=run.name)
        if run is not self.runs.open or run.state is not RunState.ACTIVE:
            raise WrongState(f"run {run.name!r} is {run.state.value}; iterations need an active run",
                             reason="RUN_NOT_ACTIVE", run=run.name, state=run.state.value)

    async def _accept_replay(self, run: Run, replayed: str, request_id: str) -> tuple[Iteration, int]:
        """The first recorded iteration that is not replayed yet."""
        past = [self._jobs.live(item) for item in await self.journal.iterations(run.name)]
        recorded = await self.recordings.next_after(past, replayed)
        rows = [row_from_json(value) for value in await self.recordings.prompts(recorded)]
        return await self._accept(run, rows, request_id, False, recorded.iteration)

    async def _accept(self, run: Run, rows: Sequence[PromptRow], request_id: str, validation: bool, recorded: int = -1
                      ) -> tuple[Iteration, int]:
        number = run.next_validation if validation else run.next_iteration
        key = IterationKey(run.name, number, validation)
        count = 1 if validation else config_of(run).sampling.samples_per_group
        prompts = await self.intake.prepare(key, rows, run.prompts_consumed, count)
        crash_point("coordinator.submit.prepared")
        iteration = Iteration(key, request_id, time.time(), run.prompts_consumed, recorded=recorded)
        counted = dataclasses.replace(
            run, next_validation=run.next_validation + validation, next_iteration=run.next_iteration + (not validation),
            prompts_consumed=run.prompts_consumed + (0 if validation else len(rows)))
        try:
            await self.journal.add_iteration(counted, iteration, [row_to_json(row) for row in rows])
        except BaseException:
            await self.intake.release(prompts)
            raise
        crash_point("coordinator.submit.journalled")
        run.next_validation, run.next_iteration = counted.next_validation, counted.next_iteration
        run.prompts_consumed = counted.prompts_consumed
        before = self.runs.last_sequence(run)
        self.runs.emit_state(iteration)
        self._jobs.add(Job(iteration, prompts))
        return iteration, before
