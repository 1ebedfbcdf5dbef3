"""The coordinator over several ranks, replicas and devices: fan-out, agreement, a rank that fails, hangs, dies, and rejoins."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator import peers, ranks
from rollplex.coordinator.records import IterationState
from rollplex.core import work
from rollplex.core.errors import BadInput, DeadlineExceeded, InternalError, WrongState

SIZES = {"train_tensor_parallel": 2, "reference_tensor_parallel": 2}
KL = {"loss": {"kl_coef": 0.1}}


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    """TP_train 2 on two devices, two rollout replicas, the reference at TP 2."""
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, **SIZES) as mesh:
        yield mesh


async def open_run(mesh, name="run", **config):
    return await mesh.coordinator.create_run(name, json.dumps(config))


async def iterate(mesh, rows=None, name="run", **options):
    iteration, _ = await mesh.coordinator.submit(name, rows or text_rows(3), "", validation=False)
    return await mesh.finished(iteration.key, **options)


async def test_every_rank_does_the_same_in_the_same_order(mesh):
    await open_run(mesh, **KL)
    assert (await iterate(mesh)).state is IterationState.DONE
    for engines in (mesh.trainers, mesh.references):
        assert len(engines) == 2 and engines[0].calls == engines[1].calls
    assert mesh.trainers[1].calls[-2:] == ["apply_update", "bind_snapshot"]
    assert "score_suffix" in mesh.references[1].calls


async def test_the_actor_is_one_slab_a_device(mesh):
    await open_run(mesh)
    await iterate(mesh)
    state = await mesh.coordinator.mesh.broker(lambda session: session.get_snapshot("run"))
    assert (state.snapshot, state.slabs) == (1, ("runs/run/actor/host:0", "runs/run/actor/host:1"))
    ledger = await mesh.coordinator.mesh.broker(lambda session: session.ledger("run"))
    actors = [row for row in ledger.rows if row.object_class == "actor_snapshot"]
    assert [(row.device, row.slab_count) for row in actors] == [("host:0", 1), ("host:1", 1)]


async def test_groups_are_split_over_replicas_and_their_samples_merged(mesh):
    await open_run(mesh, sampling={"samples_per_group": 2})
    done = await iterate(mesh, text_rows(5))
    assert [[group.group_index for group in rollout.groups] for rollout in mesh.rollouts] == [[0, 2, 4], [1, 3]]
    assert len(await mesh.coordinator.samples(done.key)) == 10
    assert [group.group_index for group in mesh.trainers[1].trained[0][0]] == [0, 1, 2, 3, 4]


async def test_fewer_groups_than_replicas(mesh):
    await open_run(mesh)
    assert (await iterate(mesh, text_rows(1))).state is IterationState.DONE
    assert "generate" not in mesh.rollouts[1].calls


@pytest.mark.parametrize(("service", "method", "phase"), [
    ("trainers", "train_suffix", "SUFFIX"), ("trainers", "materialize_prefix", "OVERLAP"),
    ("references", "score_suffix", "SUFFIX"), ("rollouts", "generate", "OVERLAP")])
async def test_a_failing_rank_is_named_with_its_phase_and_the_next_iteration_works(mesh, service, method, phase):
    def fail(context):
        raise RuntimeError("the card is on fire")

    engine = getattr(mesh, service)[1]
    engine.hooks[method] = fail
    await open_run(mesh, **KL)
    failed = await iterate(mesh)
    name = f"{engine.role}-1"
    assert failed.state is IterationState.FAILED
    assert failed.error.message.startswith(f"{name} in {phase}: RuntimeError: the card is on fire")
    assert (failed.error.metadata["service"], failed.error.metadata["phase"]) == (name, phase.lower())
    assert mesh.coordinator.runs.get("run").snapshot == 0
    engine.hooks.clear()
    assert (await iterate(mesh)).state is IterationState.DONE
    assert mesh.coordinator.runs.get("run").snapshot == 1


async def test_a_rank_that_hangs_misses_its_deadline_and_all_are_aborted(mesh):
    aborted = []

    def hang(context):
        try:
            while True:
                threading.Event().wait(0.01)
                context.check()
        except Exception:
            aborted.append("trainer-1")
            raise

    mesh.trainers[1].hooks["train_suffix"] = hang
    await open_run(mesh, phase_timeout_s=1.0)
    failed = await iterate(mesh)
    assert (failed.error.kind, failed.error.reason) == (DeadlineExceeded.__name__, "COMMAND_TIMEOUT")
    assert failed.error.message.startswith("trainer-1 in SUFFIX: ")
    assert aborted == ["trainer-1"]
    mesh.trainers[1].hooks.clear()
    assert (await iterate(mesh)).state is IterationState.DONE


async def test_abort_reaches_every_rank(mesh):
    """Rank 0 fails at once; rank 1 would work for ever."""
    ended = threading.Event()

    def fail(context):
        raise RuntimeError("out of luck")

    def work_on(context):
        try:
            while True:
                threading.Event().wait(0.01)
                context.check()
        finally:
            ended.set()

    mesh.trainers[0].hooks["train_suffix"], mesh.trainers[1].hooks["train_suffix"] = fail, work_on
    await open_run(mesh)
    failed = await iterate(mesh)
    assert failed.error.message == "trainer-0 in SUFFIX: RuntimeError: out of luck (still busy: trainer-1)"
    assert ended.is_set()


async def test_a_collective_that_broke_is_blamed_on_the_rank_that_failed(mesh):
    """Both ranks fail; the one that says why comes later."""
    def broken(context):
        raise work_error("PEER_FAILED", "a collective broke", rank=1)

    def late(context):
        threading.Event().wait(0.1)
        raise RuntimeError("no memory")

    mesh.trainers[0].hooks["train_suffix"], mesh.trainers[1].hooks["train_suffix"] = broken, late
    await open_run(mesh)
    failed = await iterate(mesh)
    assert failed.error.message.startswith("trainer-1 in SUFFIX: RuntimeError: no memory (trainer-0: a collective broke")


def work_error(reason, text, **metadata):
    from rollplex.core.errors import Aborted

    return Aborted(text, reason=reason, **metadata)


async def test_a_killed_rank_is_named_and_its_group_rejoins_and_does_its_work_again(mesh, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.5)
    loop = asyncio.get_running_loop()

    def die(context):
        asyncio.run_coroutine_threadsafe(mesh.kill("trainer-1"), loop)
        threading.Event().wait(0.3)

    mesh.trainers[1].hooks["train_suffix"] = die
    await open_run(mesh)
    iteration, _ = await mesh.coordinator.submit("run", text_rows(2), "", validation=False)
    assert (await note_of(mesh, "SERVICE_LOST")).startswith("trainer-1 was lost in SUFFIX (trainer-1 in SUFFIX: ")
    await mesh.replace("trainer-1")
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    again = ["attach", "skip_update", "bind_snapshot", "materialize_prefix", "train_suffix", "leave_snapshot",
             "measure_gradient", "apply_update", "bind_snapshot"]
    assert mesh.trainers[1].calls == again
    assert mesh.trainers[0].calls[-len(again):] == again
    assert mesh.coordinator.runs.get("run").snapshot == 1
    assert [rollout.calls.count("generate") for rollout in mesh.rollouts] == [1, 1]


async def note_of(mesh, reason):
    """The first such note's message; waits for it."""
    async for event in mesh.coordinator.watch("run", 0):
        if getattr(event.body, "reason", "") == reason:
            return event.body.message
    raise AssertionError("the watch ended")


async def test_a_replica_that_dies_generates_its_own_groups_again(mesh, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.5)
    loop = asyncio.get_running_loop()

    def die(context):
        asyncio.run_coroutine_threadsafe(mesh.kill("rollout-1"), loop)
        threading.Event().wait(0.3)

    mesh.rollouts[1].hooks["generate"] = die
    await open_run(mesh)
    iteration, _ = await mesh.coordinator.submit("run", text_rows(4), "", validation=False)
    assert (await note_of(mesh, "SERVICE_LOST")).startswith("rollout-1 was lost in OVERLAP (rollout-1 in OVERLAP: ")
    await mesh.replace("rollout-1")
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    assert mesh.rollouts[0].calls.count("generate") == 1
    assert [group.group_index for group in mesh.rollouts[1].groups] == [1, 3]


async def test_ranks_that_disagree_end_the_iteration(mesh):
    mesh.trainers[1].grad_norms = [2.0]
    await open_run(mesh)
    failed = await iterate(mesh)
    assert (failed.error.kind, failed.error.reason) == (InternalError.__name__, "RANKS_DISAGREE")
    assert "[1.0, 2.0]" in failed.error.message
    assert mesh.coordinator.runs.get("run").snapshot == 0


async def test_an_update_that_one_rank_breaks_off_is_rolled_forward_by_all(mesh):
    broken = []

    def fail_once(context):
        if not broken:
            broken.append(1)
            raise RuntimeError("half way")

    mesh.trainers[1].hooks["apply_update"] = fail_once
    await open_run(mesh)
    assert (await iterate(mesh)).state is IterationState.DONE
    assert [trainer.calls.count("apply_update") for trainer in mesh.trainers] == [2, 2]
    assert mesh.coordinator.runs.get("run").snapshot == 1


async def test_a_rank_that_thinks_otherwise_of_the_mesh_is_refused(mesh):
    mesh.trainers[1].tensor_parallel_size = 1
    with pytest.raises(WrongState, match="trainer-1 says that it is rank 1 of 1; the mesh has it as rank 1 of 2"):
        await open_run(mesh)


@pytest.mark.parametrize(("inodes", "words"), [
    ({"host:1": 99}, "different actor slabs on host:1"), ({"host:0": 7}, "on host:0; it belongs on host:1"),
    # Who binds first says whether it is another's slab or not the trainer's.
    ({"host:1": 7}, "different actor slabs on host:1|bound on several devices"), ({}, "no device")])
async def test_an_actor_bound_elsewhere_is_refused(mesh, inodes, words):
    mesh.rollouts[1].bind_snapshot = lambda context, snapshot: work.BindResult(snapshot, 1, inodes)
    with pytest.raises(InternalError, match=words):
        await open_run(mesh)


@asynccontextmanager
async def wide(tmp_path, tiny_checkpoint, **sizes):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, **sizes) as mesh:
        yield mesh


async def test_four_ranks_with_rollout_at_two(tmp_path, tiny_checkpoint):
    async with wide(tmp_path, tiny_checkpoint, train_tensor_parallel=4, rollout_tensor_parallel=2) as mesh:
        assert [rollout.devices for rollout in mesh.rollouts] == [(0, 2), (1, 3)]
        await open_run(mesh)
        assert (await iterate(mesh)).state is IterationState.DONE
        state = await mesh.coordinator.mesh.broker(lambda session: session.get_snapshot("run"))
        assert len(state.slabs) == 4


async def test_rollout_on_devices_of_its_own_takes_schedule_disaggregated_only(tmp_path, tiny_checkpoint, mesh):
    with pytest.raises(BadInput, match="own_replicas"):
        await open_run(mesh, schedule="disaggregated")
    async with wide(tmp_path / "own", tiny_checkpoint, own_replicas=1) as own:
        assert own.rollout.devices == (1,)
        with pytest.raises(BadInput, match="disaggregated"):
            await open_run(own, schedule="overlap")
        await open_run(own, schedule="disaggregated")
        assert (await iterate(own)).state is IterationState.DONE


async def test_a_replaced_rank_never_joins_its_predecessors_epoch(mesh):
    """A lone rank that came to an old epoch would wait there for the others."""
    await open_run(mesh)
    await iterate(mesh)
    await mesh.kill("trainer-1")
    replaced = await mesh.replace("trainer-1")
    group = mesh.coordinator.mesh.trainer
    before = group._epoch
    assert (await iterate(mesh)).state is IterationState.DONE
    assert replaced.communicator.announced == [before + 1] == [group._epoch]


async def test_an_epoch_that_not_all_came_to_is_not_tried_again(mesh, monkeypatch):
    monkeypatch.setattr(peers, "JOIN_TIMEOUT_S", 1.5)
    await open_run(mesh)
    group = mesh.coordinator.mesh.trainer
    before = group._epoch
    await mesh.kill("trainer-1")
    iteration, _ = await mesh.coordinator.submit("run", text_rows(3), "", validation=False)
    assert "trainer-1 does not answer" in await note_of(mesh, "SERVICE_LOST")
    tried = group._epoch
    assert tried >= before
    replaced = await mesh.replace("trainer-1")
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    assert group._epoch > tried
    assert replaced.communicator.announced[-1] == group._epoch
