"""How an iteration ends: what it is called, and what engines drop where it broke off. No grpc, no proto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import EngineGroup, Place
from rollplex.coordinator.records import IterationState, Note, Run
from rollplex.core.config import RunConfig
from rollplex.core.errors import RollplexError, WrongState
from rollplex.core.phases import Phase


def verdict(done: bool, updates_published: int, error: RollplexError | None
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


async def clean_up(mesh: Mesh, run: Run, config: RunConfig, emit: Callable[[Note], None]) -> None:
    """After an iteration that broke off: engines drop its boundaries and gradients. What is down has none left."""
    groups = mesh.used_groups(config.loss.kl_coef > 0)
    place = Place(run.name, -1, run.snapshot, config.phase_timeout_s)

    async def attempt(step: Coroutine[Any, Any, object]) -> None:
        try:
            await step
        except RollplexError as error:
            emit(Note("warning", error.reason, f"after the iteration broke off: {error}"))

    async def clear(group: EngineGroup) -> None:
        await mesh.ready(group, run, config.phase_timeout_s)
        await mesh.quiesce([group], place, leave_snapshot=False)
        if group is mesh.trainer:
            await mesh.drop_gradients(run, config.phase_timeout_s)

    await attempt(mesh.register_snapshot(run))
    await asyncio.gather(*(attempt(clear(group)) for group in groups))
    await attempt(mesh.enter_phase(run.name, -1, Phase.IDLE))
