"""Durable checkpoints as the coordinator drives them: when, beside what, what is said when they fail, and going on from one."""

from __future__ import annotations

import asyncio
import errno
import json
import threading

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.records import IterationState, Note, RunState
from rollplex.core import checkpoints
from rollplex.core.checkpoints import MANIFEST
from rollplex.core.errors import AlreadyExists, BadInput, DataLoss, NotFound, WrongState


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint) as mesh:
        yield mesh


EVERY = {"checkpoint_every": 1, "checkpoint_keep": 2}


async def open_run(mesh, name="run", resume="", **config):
    return await mesh.coordinator.create_run(name, json.dumps({**EVERY, **config}), resume)


async def iterate(mesh, count=1, name="run"):
    for _ in range(count):
        iteration, before = await mesh.coordinator.submit(name, text_rows(3), "", validation=False)
        done = await mesh.finished(iteration.key, after=before)
    return done


async def notes(mesh, name="run"):
    await mesh.coordinator.runs.log_of(mesh.coordinator.runs.get(name)).flush()
    events = await mesh.coordinator.journal.events(name, 0, 10000)
    return [(event.body.level, event.body.reason) for event in events if isinstance(event.body, Note)]


def folder(mesh, name="run"):
    return mesh.mesh.runtime_dir / "checkpoints" / name


async def lose_slabs(mesh):
    """As after power loss: nothing is in anybody's custody any more."""
    for engine in (mesh.trainer, mesh.rollout):
        engine.open_run_name, engine.bound_snapshot = "", -1

    def delete():
        for slab in mesh.trainer.session.list_slabs("runs/"):
            mesh.trainer.session.delete(slab.name)

    await asyncio.to_thread(delete)


async def test_one_a_period_with_what_is_needed_to_go_on(mesh):
    await open_run(mesh, checkpoint_every=2, seed=9, optimizer={"schedule": "linear", "total_steps": 9})
    await iterate(mesh, 3)
    found = await mesh.coordinator.checkpoints.newest("run")
    assert checkpoints.list_checkpoints(folder(mesh)) == [found.path] == [folder(mesh) / "iteration-000002"]
    manifest = checkpoints.verify(found.path)
    assert (manifest.next_iteration, manifest.snapshot, manifest.optimizer_step, manifest.prompts_consumed) == (2, 2, 2, 6)
    assert (manifest.seed, manifest.learning_rate_factor, manifest.layout_digest) == (9, 1 - 1 / 9, "digest")
    assert manifest.config["optimizer"]["total_steps"] == 9
    assert (await notes(mesh)).count(("info", "CHECKPOINT_WRITTEN")) == 1


async def test_queued_iterations_are_not_in_it(mesh):
    await open_run(mesh)
    submitted = [(await mesh.coordinator.submit("run", text_rows(3), "", validation=False))[0] for _ in range(3)]
    for iteration in submitted:
        await mesh.finished(iteration.key)
    await mesh.coordinator.checkpoints.settled()
    found = [checkpoints.verify(path) for path in checkpoints.list_checkpoints(folder(mesh))]
    assert [(one.next_iteration, one.prompts_consumed, one.snapshot) for one in found] == [(3, 9, 3), (2, 6, 2)]


async def test_it_is_written_beside_the_next_iteration_and_the_next_one_waits(mesh):
    gate = threading.Event()
    mesh.trainer.hooks["write_part"] = lambda path: gate.wait(20)
    await open_run(mesh, checkpoint_every=1)
    await iterate(mesh)
    published = threading.Event()
    mesh.trainer.hooks["apply_update"] = lambda context: published.set()
    second, _ = await mesh.coordinator.submit("run", text_rows(3), "", validation=False)
    assert await asyncio.to_thread(published.wait, 20)
    assert checkpoints.list_checkpoints(folder(mesh)) == []
    assert not (await mesh.coordinator.iteration(second.key)).state.ended  # its own checkpoint waits for the first
    gate.set()
    assert (await mesh.finished(second.key)).state is IterationState.DONE
    await mesh.coordinator.checkpoints.settled()
    assert len(checkpoints.list_checkpoints(folder(mesh))) == 2


async def test_a_full_disk_is_a_warning_and_nothing_half_is_seen(mesh):
    def full(path):
        (path / "half").write_bytes(b"x")
        raise WrongState("No space left on device", reason="CHECKPOINT_DISK_FULL")

    await open_run(mesh)
    mesh.trainer.hooks["write_part"] = full
    assert (await iterate(mesh)).state is IterationState.DONE
    await mesh.coordinator.checkpoints.settled()
    assert ("warning", "CHECKPOINT_DISK_FULL") in await notes(mesh)
    assert list(folder(mesh).iterdir()) == []
    with pytest.raises(NotFound):
        await mesh.coordinator.checkpoints.newest("run")
    del mesh.trainer.hooks["write_part"]
    assert (await iterate(mesh)).state is IterationState.DONE
    assert (await mesh.coordinator.checkpoints.newest("run")).manifest.next_iteration == 2


async def test_a_disk_that_fills_up_under_the_coordinator_is_a_warning(mesh, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    await open_run(mesh)
    monkeypatch.setattr(checkpoints, "sync", full)
    assert (await iterate(mesh)).state is IterationState.DONE
    await mesh.coordinator.checkpoints.settled()
    assert ("warning", "CHECKPOINT_IO") in await notes(mesh)
    assert list(folder(mesh).iterdir()) == []


async def test_a_trainer_that_dies_while_it_writes_costs_the_checkpoint_alone(mesh):
    gate = threading.Event()
    mesh.trainer.hooks["write_part"] = lambda path: gate.wait(20)
    await open_run(mesh)
    await iterate(mesh)
    await mesh.kill("trainer-0")
    await mesh.coordinator.checkpoints.settled()
    gate.set()
    await mesh.replace("trainer-0")
    assert checkpoints.list_checkpoints(folder(mesh)) == []
    assert [level for level, reason in await notes(mesh)].count("warning") >= 1
    assert (await iterate(mesh)).state is IterationState.DONE
    assert (await mesh.coordinator.checkpoints.newest("run")).manifest.next_iteration == 2


async def test_a_coordinator_that_stops_waits_for_none(mesh):
    """One under way, and an iteration at its end that waits for it."""
    gate, published = threading.Event(), threading.Event()
    mesh.trainer.hooks["write_part"] = lambda path: gate.wait(30)
    await open_run(mesh)
    await iterate(mesh)

    def bound(context):
        if mesh.trainer.calls.count("apply_update") == 2:
            published.set()

    mesh.trainer.hooks["bind_snapshot"] = bound
    second, _ = await mesh.coordinator.submit("run", text_rows(3), "", validation=False)
    assert await asyncio.to_thread(published.wait, 20)
    async with asyncio.timeout(15):
        await mesh.restart()
    gate.set()
    assert checkpoints.list_checkpoints(folder(mesh)) == []
    del mesh.trainer.hooks["write_part"]
    await iterate(mesh)
    assert (await mesh.coordinator.checkpoints.newest("run")).manifest.next_iteration == second.key.iteration + 2


async def test_auto_goes_on_where_slabs_are_and_else_from_the_newest_intact_one(mesh):
    await open_run(mesh)
    await iterate(mesh, 3)
    newest = await mesh.coordinator.checkpoints.newest("run")
    assert (await open_run(mesh, resume="auto")).next_iteration == 3
    assert mesh.trainer.restored == []
    await lose_slabs(mesh)
    (newest.path / "part-0").write_bytes(b"torn")
    run = await open_run(mesh, resume="auto", schedule="serial")
    assert (run.state, run.next_iteration, run.snapshot, run.optimizer_step, run.prompts_consumed) == (
        RunState.ACTIVE, 2, 2, 2, 6)
    assert [(path.name, step, digest) for path, step, digest in mesh.trainer.restored] == [("iteration-000002", 2, "digest")]
    said = await notes(mesh)
    assert ("warning", "CHECKPOINT_CORRUPT") in said and said[-1] == ("info", "RUN_RESTORED")
    done = await iterate(mesh)
    assert (done.key.iteration, done.state, done.snapshot) == (2, IterationState.DONE, 2)
    assert mesh.trainer.orders[-1].optimizer_step == 3


async def test_a_restarted_coordinator_resumes_what_was_interrupted(mesh):
    """Slabs are gone in UPDATE: nothing can be rolled forward, and the run is taken back by command."""
    await open_run(mesh)
    await iterate(mesh)
    await mesh.coordinator.checkpoints.settled()

    begun = threading.Event()

    def dies(context):
        begun.set()
        raise RuntimeError("gone")

    mesh.trainer.hooks["apply_update"] = dies
    stuck, _ = await mesh.coordinator.submit("run", text_rows(3), "", validation=False)
    assert await asyncio.to_thread(begun.wait, 20)
    await mesh.restart()
    await lose_slabs(mesh)
    assert mesh.coordinator.runs.get("run").state is RunState.RECOVERING
    run = await open_run(mesh, resume="auto")
    assert (run.state, run.next_iteration, run.snapshot) == (RunState.ACTIVE, 1, 1)
    del mesh.trainer.hooks["apply_update"]
    done = await iterate(mesh)
    assert (done.key, done.state) == (stuck.key, IterationState.DONE)


async def test_a_path_takes_a_run_back_and_begins_another(mesh):
    await open_run(mesh)
    await iterate(mesh, 2)
    await mesh.coordinator.checkpoints.settled()
    first = folder(mesh) / "iteration-000001"
    run = await open_run(mesh, resume=str(first))
    assert (run.next_iteration, run.snapshot) == (1, 1)
    other = await open_run(mesh, name="other", resume=str(first))
    assert (other.next_iteration, other.prompts_consumed) == (1, 3)
    assert mesh.coordinator.runs.get("run").state is RunState.CLOSED
    assert (await iterate(mesh, name="other")).key.iteration == 1


async def test_what_cannot_be_resumed_is_refused_and_the_open_run_stays(mesh):
    await open_run(mesh)
    await iterate(mesh)
    only = (await mesh.coordinator.checkpoints.newest("run")).path
    with pytest.raises(BadInput) as caught:
        await open_run(mesh, resume="relative/path")
    assert caught.value.reason == "BAD_RESUME"
    with pytest.raises(AlreadyExists):
        await open_run(mesh, resume="never", seed=1)
    (only / MANIFEST).write_bytes((only / MANIFEST).read_bytes()[:-5])
    with pytest.raises(DataLoss):
        await open_run(mesh, resume=str(only))
    assert (await iterate(mesh)).state is IterationState.DONE
    await mesh.coordinator.checkpoints.settled()
    for path in checkpoints.list_checkpoints(folder(mesh)):
        (path / "part-0").unlink()
    await lose_slabs(mesh)
    with pytest.raises(DataLoss) as caught:
        await open_run(mesh, resume="auto")
    assert caught.value.reason == "CHECKPOINT_NONE_INTACT"


async def test_a_lost_run_without_checkpoint_says_so(mesh):
    await open_run(mesh, checkpoint_every=0)
    await iterate(mesh)
    await lose_slabs(mesh)
    with pytest.raises(WrongState) as caught:
        await open_run(mesh, resume="auto", checkpoint_every=0)
    assert caught.value.reason == "RUN_LOST"
