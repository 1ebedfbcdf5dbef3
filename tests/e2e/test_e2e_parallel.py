"""Meshes of several ranks, replicas and devices: replayed runs agree across tensor-parallel degrees, schedules are exact."""

from __future__ import annotations

import pytest
from runs import BASE, actor_mappings, distance, iterate, mixed, new_run, weights_of

from rollplex.core.errors import WrongState

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(580)]

ITERATIONS = 3


@pytest.fixture(scope="module")
def recorded(mesh, prompts, image, tmp_path_factory):
    """A serial, deterministic run of one rank: its name, its journal, the weights before and after."""
    folder = tmp_path_factory.mktemp("recorded")
    with mesh.client as client:
        run = new_run(client, schedule="serial", deterministic=True)
        start = weights_of(client, run, folder / "start")
        iterate(client, run, mixed(prompts, image), ITERATIONS)
        return run, mesh.runtime_dir / "journal.sqlite", start, weights_of(client, run, folder / "end")


def replay(client, run, **changes):
    """All recorded iterations; the new run's name."""
    config = {"replay": run, **changes}
    name = client.create_run(f"{run}-again-{len(client.list_runs())}", config).name
    for _ in range(ITERATIONS):
        done = client.wait(client.replay_iteration(name))
        assert done.metrics["rollplex/update_skipped"] == 0.0
    with pytest.raises(WrongState, match="all of them are replayed"):
        client.replay_iteration(name)
    return name


def check_one_actor_a_device(mesh, client):
    """Trainer rank g and the rollout on device g map one file; the ledger has one actor a device."""
    found = {name: actor_mappings(mesh.pid(name)) for name in mesh.names if name.startswith(("trainer", "rollout"))}
    for rank in range(mesh.mesh.train_tensor_parallel):
        assert len(found[f"trainer-{rank}"]) == 1
    assert len(set().union(*(found[f"trainer-{rank}"] for rank in range(mesh.mesh.train_tensor_parallel)))) == (
        mesh.mesh.train_tensor_parallel)
    topology = mesh.mesh.topology
    for replica in range(topology.replica_count):
        # Other ranks of the replica are processes of their own.
        leader = topology.replica_devices(replica)[0]
        assert found[f"rollout-{replica}"] == found[f"trainer-{leader}"]
    rows = [row for row in client.mesh().ledger if row.object_class == "actor_snapshot"]
    assert sorted((row.device, row.slab_count) for row in rows) == [
        (f"host:{device}", 1) for device in range(topology.device_count)]


def test_a_replay_of_one_rank_is_bit_identical(mesh, recorded, tmp_path):
    run, _, _, end = recorded
    with mesh.client as client:
        again = weights_of(client, replay(client, run, schedule="overlap"), tmp_path / "again")
    assert all(again[name].tobytes() == end[name].tobytes() for name in end)


@pytest.mark.parametrize("shared", [False, True], ids=["together", "data parallel"])
def test_two_training_ranks_over_two_replicas(another_mesh, recorded, prompts, image, tmp_path, shared):
    """TP_train 2, TP_rollout 1, reference of two ranks; float32 on the same tokens: 1e-3. Then live, with a killed rank."""
    run, journal, start, end = recorded
    sizes = {"train_tensor_parallel": 2, "reference_tensor_parallel": 2, "data_parallel": shared}
    with another_mesh(sizes=sizes, coordinator={"replay_journal": str(journal)}) as wide, wide.client as client:
        name = replay(client, run)
        check_one_actor_a_device(wide, client)
        error = distance(weights_of(client, name, tmp_path / "two"), end, start)
        print(f"TP_train 2, TP_rollout 1, float32: ||dA - dB|| / ||dA|| = {error:.1e}")
        assert error <= 1e-3
        live = new_run(client)
        iterate(client, live, mixed(prompts, image))
        handle = client.submit_iteration(live, mixed(prompts, image))
        wide.kill("trainer-1")
        wide.start("trainer-1")
        assert client.wait(handle).state == "done"
        iterate(client, live, mixed(prompts, image))
        assert client.get_run(live).snapshot == 3


def test_four_training_ranks_over_rollout_at_two_in_float64(another_mesh, recorded, tmp_path):
    """The recorded tokens again in float64, at TP 1 and at TP_train 4, TP_rollout 2: 1e-10."""
    run, journal, _, _ = recorded
    options = {"dtype": "float64", "coordinator": {"replay_journal": str(journal)}}
    with another_mesh(**options) as narrow, narrow.client as client:
        name = client.create_run("start", {**BASE, "deterministic": True}).name
        start = weights_of(client, name, tmp_path / "start")
        expected = weights_of(client, replay(client, run), tmp_path / "one")
    sizes = {"train_tensor_parallel": 4, "rollout_tensor_parallel": 2}
    with another_mesh(sizes=sizes, **options) as wide, wide.client as client:
        name = replay(client, run)
        check_one_actor_a_device(wide, client)
        error = distance(weights_of(client, name, tmp_path / "four"), expected, start)
    print(f"TP_train 4, TP_rollout 2, float64: ||dA - dB|| / ||dA|| = {error:.1e}")
    assert error <= 1e-10


def test_disaggregated_is_bit_identical_and_copies_the_snapshot(another_mesh, recorded, prompts, image, tmp_path):
    _, _, _, end = recorded
    with another_mesh(sizes={"own_replicas": 1}) as own, own.client as client:
        run = new_run(client, schedule="disaggregated", deterministic=True)
        last = iterate(client, run, mixed(prompts, image), ITERATIONS)
        found = weights_of(client, run, tmp_path / "own")
        trainer, rollout = (actor_mappings(own.pid(name)) for name in ("trainer-0", "rollout-0"))
        assert len(trainer) == len(rollout) == 1 and trainer != rollout
        rows = [row for row in client.mesh().ledger if row.object_class == "actor_snapshot"]
        assert [(row.device, row.role, row.slab_count) for row in rows] == [
            ("host:1", "rollout", 1), ("host:0", "trainer", 1)]
        assert last.metrics["rollplex/copy/bytes"] == rows[0].size_bytes
        own.kill("rollout-0")
        own.start("rollout-0")
        iterate(client, run, prompts[:1])
    assert all(found[name].tobytes() == end[name].tobytes() for name in end)


def test_schedules_are_bit_identical_at_two_ranks(another_mesh, recorded, prompts, image, tmp_path):
    """TP_train 2, TP_rollout 2, live: serial, overlap, and disaggregated, where each shard is copied to a device of its own."""
    _, _, start, end = recorded
    sizes = {"train_tensor_parallel": 2, "rollout_tensor_parallel": 2}
    found = {}
    with another_mesh(sizes=sizes) as shared, shared.client as client:
        for schedule in ("serial", "overlap"):
            run = new_run(client, schedule=schedule, deterministic=True)
            iterate(client, run, mixed(prompts, image), ITERATIONS)
            found[schedule] = weights_of(client, run, tmp_path / schedule)
    with another_mesh(sizes={**sizes, "own_replicas": 1}) as own, own.client as client:
        run = new_run(client, schedule="disaggregated", deterministic=True)
        last = iterate(client, run, mixed(prompts, image), ITERATIONS)
        found["disaggregated"] = weights_of(client, run, tmp_path / "disaggregated")
        rows = [row for row in client.mesh().ledger if row.object_class == "actor_snapshot"]
        assert sorted((row.device, row.role, row.slab_count) for row in rows) == [
            ("host:0", "trainer", 1), ("host:1", "trainer", 1), ("host:2", "rollout", 1), ("host:3", "rollout", 1)]
        assert last.metrics["rollplex/copy/bytes"] == 2 * rows[0].size_bytes
        own.kill("rollout-0")
        own.start("rollout-0")
        iterate(client, run, prompts[:1])
    for schedule in ("overlap", "disaggregated"):
        assert all(found[schedule][name].tobytes() == found["serial"][name].tobytes() for name in end), schedule
    error = distance(found["serial"], end, start)
    print(f"TP 2 live, float32, against TP 1 live: ||dA - dB|| / ||dA|| = {error:.1e}")
    assert error <= 1e-3
