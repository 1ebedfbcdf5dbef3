"""A trainer's part of durable checkpoints over its socket: written beside an iteration, read back bit for bit, at any degree."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from trainer_ranks import TrainerRanks, distance, trainer_ranks
from trainer_rig import config, respond

from rollplex.core import checkpoints, work
from rollplex.core.errors import NotFound, WrongState
from rollplex.model import load_into, read_model_config


def states_of(engine) -> dict[str, torch.Tensor]:
    optimizer = engine._state.optimizer
    return {name: torch.cat([rows for _, rows in optimizer.parts(name)], dim=1).clone()
            for name, _ in optimizer.layout.element_counts}


def register(mesh, client, snapshot: int) -> None:
    mesh.session.register_snapshot(client.run, [client.slab], snapshot)
    client.bind(snapshot)


def test_state_and_snapshot_come_back_bit_for_bit_under_other_chunks(serve, mesh, groups, tmp_path):
    path = tmp_path / "c"
    with serve() as (client, engine):
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
        before, actor = states_of(engine), client.actor_bytes(1)
        begun = client.start_checkpoint(path, 1)
        # The next iteration goes on beside it; its update waits until the state has been read.
        client.iterate(groups, 1)
        written = client.wait_checkpoint(path)
        assert written.size_bytes == sum(file.stat().st_size for file in path.rglob("*.safetensors"))
        assert begun.size_bytes <= written.size_bytes
        unbroken, unbroken_actor = states_of(engine), client.actor_bytes(2)
        assert any((before[name] != unbroken[name]).any() for name in before)
    smaller = replace(config(), optimizer=replace(config().optimizer, chunk_elements=7_000))
    for index, again in enumerate((config(), smaller)):
        with serve() as (client, engine):
            client.run = f"{client.run}-{index}"
            client.slab = f"runs/{client.run}/actor/host:0"
            client.open(again, register=False)
            client.restore(path, 1, written.layout_digest)
            register(mesh, client, 1)
            assert client.actor_bytes(1) == actor
            assert engine._state.optimizer.optimizer_step == 1
            assert all(torch.equal(states_of(engine)[name], before[name]) for name in before)
            client.iterate(groups, 1)
            assert client.actor_bytes(2) == unbroken_actor
            assert all(torch.equal(states_of(engine)[name], unbroken[name]) for name in before)


def test_weights_are_a_hugging_face_directory(serve, mesh, groups, tmp_path):
    from transformers import AutoConfig

    with serve() as (client, engine):
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
        client.start_checkpoint(tmp_path / "c", 1)
        client.wait_checkpoint(tmp_path / "c")
        client.export(tmp_path / "export", 1)
        found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "c/weights", tmp_path / "export"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert AutoConfig.from_pretrained(tmp_path / "c/weights").model_type == "qwen2_5_vl"
        for row, name in enumerate(checkpoints.STATE_FILES):
            whole = load_file(tmp_path / "c" / name)
            assert whole.keys() == states_of(engine).keys()
            assert all(torch.equal(whole[key].reshape(-1), states[row][:whole[key].numel()])
                       for key, states in states_of(engine).items())


def test_the_update_waits_for_the_writer_and_nothing_else_does(serve, mesh, groups, tmp_path, monkeypatch):
    """The writer is held in its first write until the update has been ordered."""
    gate, held, real = threading.Event(), threading.Event(), os.pwrite

    def slow(*arguments):
        if threading.current_thread().name == "checkpoint":
            held.set()
            assert gate.wait(30)
        return real(*arguments)

    with serve() as (client, engine):
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
        before = states_of(engine)
        monkeypatch.setattr(os, "pwrite", slow)
        client.start_checkpoint(tmp_path / "c", 1)
        assert held.wait(30)
        client.materialize(groups, 1)
        client.train(respond(groups, seed=1), 1)
        norm = client.measure().grad_norm
        epoch = {}

        def update():
            client.quiesce()
            epoch["order"] = work.UpdateOrder(client.begin(1), min(1.0, 0.5 / norm), 1.0, 2)
            client.apply(epoch["order"], 1)

        updating = threading.Thread(target=update)
        updating.start()
        updating.join(0.5)
        assert updating.is_alive() and "order" not in epoch
        gate.set()
        updating.join(30)
        assert not updating.is_alive()
        client.wait_checkpoint(tmp_path / "c")
        whole = load_file(tmp_path / "c" / "exp_avg.safetensors")
        assert all(torch.equal(whole[name].reshape(-1), before[name][1][:whole[name].numel()]) for name in before)
        mesh.session.publish_snapshot(client.run, epoch["order"].update_epoch, 2)


def test_a_full_disk_is_said_and_the_run_goes_on(serve, groups, tmp_path, monkeypatch):
    real = os.pwrite

    def full(descriptor, data, offset):
        if offset > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    with serve() as (client, _):
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
        monkeypatch.setattr(os, "pwrite", full)
        client.start_checkpoint(tmp_path / "c", 1)
        with pytest.raises(WrongState, match="No space left") as caught:
            client.wait_checkpoint(tmp_path / "c")
        assert caught.value.reason == "CHECKPOINT_DISK_FULL"
        monkeypatch.undo()
        client.iterate(groups, 1)
        client.start_checkpoint(tmp_path / "d", 2)
        client.wait_checkpoint(tmp_path / "d")


def test_refusals(serve, mesh, groups, tmp_path):
    with serve() as (client, _):
        client.open(config())
        client.bind(0)
        with pytest.raises(NotFound):
            client.wait_checkpoint(tmp_path / "c")
        client.start_checkpoint(tmp_path / "c", 0)
        digest = client.wait_checkpoint(tmp_path / "c").layout_digest
        with pytest.raises(WrongState) as caught:
            client.restore(tmp_path / "c", 0, digest)
        assert caught.value.reason == "RUN_NOT_NEW"
    frozen = replace(config(), optimizer=replace(config().optimizer, vision_learning_rate=0.0))
    with serve() as (client, _):
        client.run += "-frozen"
        client.open(frozen, register=False)
        with pytest.raises(WrongState, match="trains other modules") as caught:
            client.restore(tmp_path / "c", 0, digest)
        assert caught.value.reason == "CHECKPOINT_MISMATCH"


# Ranks as processes.


@pytest.fixture
def ranks(mesh, run, tmp_path):
    def start(train_tp: int, rollout_tp: int, shared: bool = False):
        section = replace(mesh.section, train_tensor_parallel=train_tp, rollout_tensor_parallel=rollout_tp, data_parallel=shared)
        whole = replace(mesh.config, mesh=section, trainer=replace(mesh.config.trainer, check_hashes=True))
        return trainer_ranks(whole, mesh.session, f"{run}-{train_tp}-{rollout_tp}", tmp_path)

    return start


def resume(group: TrainerRanks, path, step: int, digest: str) -> None:
    opened = group.each(lambda client: client.open(config(), register=False))
    group.each(lambda client: client.restore(path, step, digest))
    group.session.register_snapshot(group.run, [result.actor_slab for result in opened], step)
    group.each(lambda client: client.bind(step))


@pytest.mark.ranks
@pytest.mark.parametrize("pair", [(2, 1), (2, 2)], ids=str)
def test_written_at_tp_2_it_goes_on_at_any_degree(ranks, mesh, groups, tmp_path, pair):
    """Bit for bit at the same degrees, to float32's rounding at others, or where replicas share groups out (the last of a case).
    Rollout at TP 1 stores some parameters transposed."""
    path = tmp_path / "c"
    with ranks(*pair) as group:
        group.open(config())
        start = group.actor(0)
        group.iterate(groups, 0)
        saved = group.actor(1)
        group.each(lambda client: client.start_checkpoint(path, 1))
        parts = group.each(lambda client: client.wait_checkpoint(path))
        digest = parts[0].layout_digest
        assert digest == parts[1].layout_digest and all(part.size_bytes > 0 for part in parts)
        group.iterate(groups, 1)
        expected = group.actor(2)
    model = read_model_config(mesh.checkpoint)
    views = {name: torch.zeros_like(values) for name, values in saved.items()}
    load_into(path / "weights", model, views)
    assert all(torch.equal(views[name][:model.vocab_size], values[:model.vocab_size]) for name, values in saved.items())
    for other in ((1, 1), (4, 2), pair, (2, 1, True)) if pair == (2, 1) else ((1, 1), pair):
        with ranks(*other) as group:
            resume(group, path, 1, digest)
            restored = group.actor(1)
            group.iterate(groups, 1)
            found = group.actor(2)

        def cut(values):
            return {name: value[:model.vocab_size] for name, value in values.items()}

        assert all(torch.equal(cut(restored)[name], value) for name, value in cut(saved).items()), other
        error = distance(cut(found), cut(expected), cut(saved))
        print(f"TP 2 over rollout TP {pair[1]} -> TP {other[0]} over {other[1]}: ||dA - dB|| / ||dA|| = {error:.1e}")
        assert error <= (0 if other == pair else 1e-3)
    assert any((start[name] != saved[name]).any() for name in start)
