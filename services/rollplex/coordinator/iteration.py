"""One iteration, as straight code: OVERLAP, SUFFIX, UPDATE, with a barrier between each.

A service that is lost has its own part done again (recovery.py), within the step that needs it.
"""

from __future__ import annotations

import contextlib

from rollplex.coordinator.metrics import group_metrics, sample_metrics, time_metrics
from rollplex.coordinator.overlap import overlap, report_progress, respond
from rollplex.coordinator.peers import EngineGroup, together
from rollplex.coordinator.suffix import mini_batch_gradient, mini_batches, score
from rollplex.coordinator.update import apply_update
from rollplex.coordinator.work import IterationWork
from rollplex.core.errors import InternalError, RollplexError
from rollplex.core.phases import Phase, PhaseEvent


async def run_iteration(work: IterationWork) -> None:
    """k -> k+1. On an error before UPDATE_BEGIN nothing has changed; see update.py for after."""
    with work.timeline.span(Phase.IDLE, "ready"):
        await _begin(work)
    with work.timeline.span(Phase.OVERLAP, "overlap"):
        await work.recovery.within(overlap(work))
    with work.timeline.span(Phase.OVERLAP, "release"):
        await _release_rollout(work)
        work.plan()
    await work.move(PhaseEvent.RESPONSES_FIXED)
    batches = mini_batches(work, await work.recovery.within(score(work)))
    work.batch_count = len(batches)
    for index, batch in enumerate(batches):
        if index < work.updates_published:
            continue  # an earlier coordinator's
        gradient = await mini_batch_gradient(work, index, batch)
        await apply_update(work, index, gradient)
    if not batches:
        work.metrics["rollplex/update_skipped"] = 1.0
    if work.phase is Phase.SUFFIX:
        await _let_go(work, work.mesh.used_groups(work.with_reference))
        await work.move(PhaseEvent.ENDED)
    await _measure(work)


async def run_validation(work: IterationWork) -> None:
    """Greedy responses and their rewards under the current snapshot; nothing is trained."""
    await _begin(work)
    await work.recovery.within(respond(work))
    await _release_rollout(work)
    await work.move(PhaseEvent.ENDED)
    report_progress(work, final=True)
    work.metrics.update(sample_metrics(work.prompts, list(work.samples.values())))
    work.metrics.update(time_metrics(work.timeline, work.metrics["perf/total_num_tokens"]))


async def _begin(work: IterationWork) -> None:
    """Every service that the iteration uses is there, on its snapshot."""
    mesh, survive = work.mesh, work.recovery.survive
    groups = mesh.used_groups(work.with_reference)
    await survive(None, lambda: mesh.register_snapshot(work.run), what=lambda: "registering the snapshot")
    await together(*(work.recovery.present(group) for group in groups))
    await mesh.check_fits(groups, work.run.name)
    if work.resumed:
        await _clear(work)
    work.plan()
    await work.move(PhaseEvent.BEGIN)


async def _clear(work: IterationWork) -> None:
    """What the engines did for an earlier coordinator is not known here, so nothing of it is used."""
    mesh, survive = work.mesh, work.recovery.survive
    await together(*(survive(group, lambda group=group: mesh.quiesce([group], work.place(), leave_snapshot=False))
                     for group in mesh.used_groups(work.with_reference)))
    await survive(mesh.trainer, lambda: mesh.drop_gradients(work.run, work.config.phase_timeout_s))
    # What was held in a phase that broke off says nothing.
    with contextlib.suppress(InternalError):
        await survive(None, lambda: mesh.enter_phase(work.run.name, -1, Phase.IDLE))


async def _release_rollout(work: IterationWork) -> None:
    """Rollout's keys and values go; a replica that is gone has none."""
    await _let_go(work, work.mesh.rollouts)


async def _let_go(work: IterationWork, groups: list[EngineGroup]) -> None:
    place = work.place()
    await together(*(work.recovery.spare(
        group, lambda group=group: work.mesh.let_go(group, place, leave_snapshot=False)) for group in groups))


async def _measure(work: IterationWork) -> None:
    work.metrics.update(sample_metrics(work.prompts, list(work.samples.values())))
    work.metrics.update(group_metrics(list(work.by_group().values())))
    work.metrics.update(time_metrics(work.timeline, work.metrics["perf/total_num_tokens"]))
    work.metrics["training/global_step"] = float(work.run.optimizer_step)
    # The iteration is done whatever the broker answers.
    with contextlib.suppress(RollplexError):
        work.metrics.update({f"memory/unexplained_bytes/{phase}": float(size)
                             for phase, size in (await work.mesh.unexplained(work.run.name)).items()})
