"""The host pool is full: what does not fit is refused with the ledger's table, what runs goes on."""

from __future__ import annotations

import asyncio
import json

import pytest
from PIL import Image
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.config import CoordinatorConfig
from rollplex.coordinator.records import IterationState
from rollplex.core.errors import OutOfMemory
from rollplex.data.rows import MediaRef, PromptRow

LIMIT_BYTES = 100_000


def picture(path, index=0):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    return PromptRow(index, messages, (MediaRef("image", str(path)),), ground_truth="A", problem_type="multiple choice")


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    config = CoordinatorConfig(builtin_reward="", media_roots=(tmp_path,))
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, config, host_limit_bytes=LIMIT_BYTES) as mesh:
        await mesh.coordinator.create_run("run", json.dumps({"sampling": {"samples_per_group": 2}}))
        yield mesh


async def submit(mesh, rows):
    iteration, _ = await mesh.coordinator.submit("run", rows, "", validation=False)
    return await mesh.finished(iteration.key)


async def held(mesh):
    return (await mesh.coordinator.mesh.broker(lambda session: session.ledger())).host_slab_bytes


async def test_media_that_do_not_fit_are_refused_with_the_table_and_the_run_goes_on(mesh, tmp_path):
    large, small = tmp_path / "large.png", tmp_path / "small.png"
    Image.new("RGB", (392, 392), (200, 30, 30)).save(large)
    Image.new("RGB", (56, 56), (30, 200, 30)).save(small)
    before = await held(mesh)
    with pytest.raises(OutOfMemory, match="do not fit") as refused:
        # The first one fits, and must not stay.
        await submit(mesh, [picture(small), picture(large, 1)])
    assert refused.value.reason == "OUT_OF_HOST_MEMORY"
    for words in ("object class", "actor_snapshot", f"of {LIMIT_BYTES:,} host bytes"):
        assert words in str(refused.value), words
    assert await held(mesh) == before
    assert mesh.coordinator.runs.get("run").next_iteration == 0
    for rows in (text_rows(2), [picture(small)]):
        assert (await submit(mesh, rows)).state is IterationState.DONE
    # An iteration's media go once its end has been told.
    for _ in range(600):
        if await held(mesh) == before:
            break
        await asyncio.sleep(0.05)
    assert await held(mesh) == before
    assert mesh.coordinator.runs.get("run").snapshot == 2


async def test_an_iteration_that_runs_is_not_touched_by_one_that_does_not_fit(mesh, tmp_path):
    large = tmp_path / "large.png"
    Image.new("RGB", (392, 392), (200, 30, 30)).save(large)
    import threading

    mesh.rollout.last_token_gate = threading.Event()
    running, _ = await mesh.coordinator.submit("run", text_rows(2), "", validation=False)
    with pytest.raises(OutOfMemory):
        await mesh.coordinator.submit("run", [picture(large)], "", validation=False)
    mesh.rollout.last_token_gate.set()
    assert (await mesh.finished(running.key)).state is IterationState.DONE
