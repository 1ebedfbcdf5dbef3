"""UPDATE, in the order of update-protocol.md, and rolling it forward after a death."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollplex.coordinator import orders
from rollplex.coordinator.peers import Place, together
from rollplex.coordinator.records import Note, Run, RunState, UpdateRecord
from rollplex.core.config import RunConfig
from rollplex.core.errors import RollplexError, Unavailable
from rollplex.core.learning_rate import learning_rate_factor
from rollplex.core.phases import Phase, PhaseEvent
from rollplex.core.work import GradientResult, UpdateOrder

if TYPE_CHECKING:
    from rollplex.coordinator.journal import Journal
    from rollplex.coordinator.mesh import Mesh
    from rollplex.coordinator.work import IterationWork

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between tries to roll an update forward; doubled each time."""


async def apply_update(work: IterationWork, mini_batch: int, gradient: GradientResult) -> None:
    """UPDATE_BEGIN, chunks, publish, bind. A gradient that is not finite skips all but the last."""
    with work.timeline.span(Phase.UPDATE, "update"):
        if gradient.finite:
            with work.timeline.span(Phase.UPDATE, "write"):
                await _update(work, mini_batch, gradient)
        else:
            await _skip(work, gradient)
        last = mini_batch == work.batch_count - 1
        try:
            with work.timeline.span(Phase.UPDATE, "bind"):
                await _bind(work)
            await work.move(PhaseEvent.PUBLISHED if last else PhaseEvent.NEXT_MINI_BATCH)
        except RollplexError as error:
            if not last:
                raise
            # The update is published: the iteration is done, and the next one mends the mesh before it begins.
            work.emit(Note("warning", error.reason, f"after the update: {error}"))


async def _bind(work: IterationWork) -> None:
    """All engines bind what was published. Who is gone binds it with the next work that needs it."""
    mesh = work.mesh
    groups = mesh.used_groups(work.with_reference)
    bound = await together(*(work.recovery.spare(
        group, lambda group=group: mesh.ready(group, work.run, work.config.phase_timeout_s)) for group in groups))
    if mesh.topology.own_replicas:
        copies = [outcome for group, outcomes in zip(groups, bound) if group in mesh.rollouts for outcome in outcomes or ()]
        # Of the slowest replica, whose whole bind it is.
        for name, value in (("bytes", float(sum(outcome.value.copied_bytes for outcome in copies))),
                            ("seconds", max((outcome.work_s for outcome in copies), default=0.0))):
            work.metrics[f"rollplex/copy/{name}"] = work.metrics.get(f"rollplex/copy/{name}", 0.0) + value


async def _update(work: IterationWork, mini_batch: int, gradient: GradientResult) -> None:
    optimizer, run = work.config.optimizer, work.run
    factor = learning_rate_factor(optimizer, run.optimizer_step + 1)
    work.average({"actor/lr": optimizer.learning_rate * factor, "learning_rate": optimizer.learning_rate * factor})
    record = UpdateRecord(work.key.iteration, mini_batch, work.batch_count, run.snapshot, run.optimizer_step + 1,
                          clip_coefficient(gradient.grad_norm, optimizer.max_grad_norm), factor, gradient.grad_norm,
                          dict(work.metrics))
    # Before the write: a cancellation while it runs does not undo it.
    work.update_begun = True
    try:
        await work.journal.begin_update(run.name, record)
    except (sqlite3.Error, Unavailable):
        work.update_begun = False
        raise
    try:
        await _write_and_publish(work.mesh, work.journal, run, record, work.place())
    except RollplexError as error:
        work.emit(Note("warning", error.reason, f"the update broke off and is rolled forward: {error}"))
        await roll_forward(work.mesh, work.journal, run, work.config, record, work.emit)
    work.update_begun, work.updates_published = False, work.updates_published + 1


async def _skip(work: IterationWork, gradient: GradientResult) -> None:
    work.updates_published += 1
    work.emit(Note("warning", "NON_FINITE_GRADIENT",
                   f"the gradient norm is {gradient.grad_norm}: the update is skipped, snapshot {work.run.snapshot} stays"))
    # A trainer that is gone has none; the next prefix drops what its slab has.
    await work.recovery.spare(work.mesh.trainer, lambda: work.mesh.drop_gradients(work.run, work.config.phase_timeout_s))


def clip_coefficient(grad_norm: float, max_grad_norm: float) -> float:
    """Factor on every gradient, as torch.nn.utils.clip_grad_norm_: min(1, max / (norm + 1e-6)); 1 when clipping is off."""
    if not max_grad_norm or not math.isfinite(grad_norm):
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


async def _write_and_publish(mesh: Mesh, journal: Journal, run: Run, record: UpdateRecord, place: Place) -> None:
    writers = [rank.name for rank in mesh.trainer.ranks]
    state = await mesh.broker(lambda session: session.get_snapshot(run.name))
    if state.snapshot == record.snapshot + 1:
        # The broker had published when this record's update broke off; only the journal does not know yet.
        await _publish_in_journal(journal, run, record)
        return
    epoch = await mesh.broker(lambda session: session.begin_update(run.name, record.snapshot, writers))
    order = UpdateOrder(epoch, record.clip_coefficient, record.learning_rate_factor, record.optimizer_step)
    await mesh.trainer.command(orders.apply_update(order), place)
    await mesh.broker(lambda session: session.publish_snapshot(run.name, epoch, record.snapshot + 1))
    await _publish_in_journal(journal, run, record)


async def _publish_in_journal(journal: Journal, run: Run, record: UpdateRecord) -> None:
    run.snapshot, run.optimizer_step, run.state = record.snapshot + 1, record.optimizer_step, RunState.ACTIVE
    await journal.publish(run, record.snapshot)


async def roll_forward(mesh: Mesh, journal: Journal, run: Run, config: RunConfig, record: UpdateRecord,
                       emit: Callable[[Note], None]) -> None:
    """Finishes an update that was begun, however long it takes: the run is RECOVERING until then and takes no iterations.

    The trainer re-imports its slabs and redoes the chunks that had not flipped.
    """
    run.state = RunState.RECOVERING
    await journal.put_run(run)
    place = Place(run.name, record.iteration, record.snapshot, config.phase_timeout_s, Phase.UPDATE)
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            await mesh.trainer.ensure_joined()
            await mesh.attach(mesh.trainer, run, config.phase_timeout_s)
            await _write_and_publish(mesh, journal, run, record, place)
            return
        except RollplexError as error:
            emit(Note("warning", error.reason, f"the update is tried again in {pause_s:g} s: {error}"))
            if error.reason in ("READERS_REMAIN", "LEASE_CONFLICT"):
                await _make_leave(mesh, place, error.metadata.get("holders", ""))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _make_leave(mesh: Mesh, place: Place, holders: str) -> None:
    """Asks engines that still read the snapshot to leave it: one that could not be reached when the others left, or that a dead
    coordinator never told."""
    for group in mesh.groups:
        if group is not mesh.trainer and any(rank.name in holders for rank in group.ranks):
            # One that cannot is killed by the broker once its connection is gone; the update is tried again either way.
            with contextlib.suppress(RollplexError):
                await mesh.let_go(group, place, leave_snapshot=True)
