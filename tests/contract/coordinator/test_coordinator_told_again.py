"""Whoever waits for an iteration hears of its end: who submits again too, whatever a coordinator was killed before saying."""

from __future__ import annotations

import asyncio
import json

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.records import IterationState, StateChange


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint) as mesh:
        await mesh.coordinator.create_run("run", json.dumps({}))
        yield mesh


async def iterate(mesh) -> None:
    iteration, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    await mesh.finished(iteration.key)


async def heard_states(mesh, after_sequence: int) -> list[str]:
    """Of the run's iterations, up to the first end."""
    states: list[str] = []
    async with asyncio.timeout(20):
        async for event in mesh.coordinator.watch("run", after_sequence):
            if isinstance(event.body, StateChange):
                states.append(event.body.iteration["state"])
                if IterationState(states[-1]).ended:
                    return states
    raise AssertionError("a watch has no end")


async def forget_events(mesh, after_sequence: int) -> None:
    """As if the coordinator had been killed before it wrote them."""
    await mesh.coordinator.runs.log_of(mesh.coordinator.runs.get("run")).flush()
    await mesh.coordinator.journal._commit([("DELETE FROM events WHERE run = ? AND sequence > ?", [("run", after_sequence)])])


async def test_the_same_request_again_is_told_from_the_beginning(mesh):
    await iterate(mesh)
    first, before = await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False)
    await mesh.finished(first.key)
    for _ in range(2):
        again, told_from = await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False)
        assert (again.key, told_from) == (first.key, before)
        assert await heard_states(mesh, told_from) == ["queued", "running", "done"]
        await mesh.restart()


@pytest.mark.parametrize("kept", ["nothing", "queued"])
async def test_an_end_that_was_written_and_not_told_is_told_by_the_successor(mesh, kept):
    first, before = await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False)
    await mesh.finished(first.key)
    await forget_events(mesh, before + (kept == "queued"))
    await mesh.restart()
    assert await heard_states(mesh, before) == (["done"] if kept == "nothing" else ["queued", "done"])


async def test_a_restart_repeats_nothing_that_was_told(mesh):
    await iterate(mesh)
    await mesh.coordinator.runs.log_of(mesh.coordinator.runs.get("run")).flush()
    last = mesh.coordinator.runs.last_sequence(mesh.coordinator.runs.get("run"))
    await mesh.restart()
    assert mesh.coordinator.runs.last_sequence(mesh.coordinator.runs.get("run")) == last
