"""Rollout on a GPU, beyond the contract of tests/contract/rollout (engines torch-cuda and vllm-cuda): memory, kills, bfloat16.

Engines are processes of their own, as in a mesh: one has a GPU context and a CUDA-graph pool, and one is killed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import ledger_bytes
from gpu_marks import NEEDS_GPU
from replica_rig import VLLM, replica_process
from rollout_rig import SAMPLING, actor_mesh, generate, start, teacher_forced, tokens_of
from tiny_checkpoint import frozen_model, save_tiny

from rollplex.core import work
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.core.topology import Topology
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(480)]
TOPOLOGY = Topology(device_kind="cuda")
GREEDY = dataclasses.replace(SAMPLING, greedy=True)
KV_GIB = 4
OPTIONS = {"torch": (), "vllm": (*VLLM, "--set", f"rollout.vllm.kv_cache_gib={KV_GIB}")}
GIB = 1 << 30

# As in tests/contract/rollout/test_rollout_bfloat16.py, where two bfloat16 computations are compared; here one of them is exact,
# and the other may keep its logits in bfloat16 while it divides them by the temperature.
MAXIMUM, MEAN, BIAS = 0.2, 0.03, 0.006


@pytest.fixture(scope="module", params=["torch", "vllm"])
def engine(request):
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    return request.param


@pytest.fixture(scope="module")
def mesh(engine, tmp_path_factory):
    folders = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("g", numbered=True)
    with actor_mesh(save_tiny(folders[0]), folders[1], TOPOLOGY, dtype="bfloat16") as made:
        yield made


@pytest.fixture(scope="module")
def replica(engine, mesh):
    with serving(engine, mesh) as (client, process):
        client.open_run()
        yield SimpleNamespace(client=client, process=process)


@pytest.fixture
def bound(mesh, replica):
    replica.client.bind(mesh.actor.snapshot)
    yield replica.client
    replica.client.quiesce()


def serving(engine, mesh):
    return replica_process(mesh, TOPOLOGY, 0, "--set", "model.dtype=bfloat16", *OPTIONS[engine])


def used_bytes() -> int:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def slab_hash(mesh) -> str:
    """Of the actor's bytes as they lie on the device."""
    size = mesh.actor.layout.size_bytes
    with mesh.session.lease(mesh.actor.slab, LeaseMode.READ, snapshot=mesh.actor.snapshot) as lease:
        mapped = MappedSlab(driver_of("cuda:0"), size)
        try:
            mapped.bind(lease)
            data = mapped.tensor(Placement.contiguous(mesh.actor.slab, 0, (size,), "uint8")).cpu().numpy().tobytes()
        finally:
            mapped.close()
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", ["text", "image", "video", "mixed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bfloat16_differs_from_the_exact_logprobs_by_rounding(mesh, bound, kind, temperature):
    exact = frozen_model(mesh.checkpoint)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    groups = [mesh.prompts.group(kind, index, samples=8) for index in range(4)]
    outcome = generate(mesh, bound, groups, dataclasses.replace(SAMPLING, temperature=temperature, max_response_tokens=64))
    difference = []
    for group in groups:
        samples = [outcome.samples[group.group_index, index] for index in range(8)]
        for sample, expected in zip(samples, teacher_forced(mesh, group, samples, temperature, exact)):
            difference.append(np.array(sample.logprobs) - expected)
    difference = np.concatenate(difference)
    print(f"\n{kind}, temperature {temperature}: {difference.size} tokens; max {np.abs(difference).max():.3f}, "
          f"mean {np.abs(difference).mean():.4f}, signed {difference.mean():+.4f}")
    assert np.abs(difference).max() <= MAXIMUM / temperature
    assert np.abs(difference).mean() <= MEAN / temperature
    assert abs(difference.mean()) <= BIAS / temperature


def test_nothing_writes_to_the_slab_and_a_publish_changes_greedy_output(mesh, bound):
    group = mesh.prompts.group("video", samples=1)
    before, bytes_before = tokens_of(generate(mesh, bound, [group], GREEDY)), slab_hash(mesh)
    generate(mesh, bound, [mesh.prompts.group("mixed", index, samples=8) for index in range(2)])
    assert slab_hash(mesh) == bytes_before
    bound.quiesce()

    def roll(by):
        return lambda views: views["lm_head.weight"].copy_(views["lm_head.weight"].roll(by, 0).clone())

    bound.bind(mesh.actor.publish(roll(1)))
    assert tokens_of(generate(mesh, bound, [group], GREEDY)) != before
    bound.quiesce()
    bound.bind(mesh.actor.publish(roll(-1)))
    assert slab_hash(mesh) == bytes_before
    assert tokens_of(generate(mesh, bound, [group], GREEDY)) == before


def test_many_rebinds_replay_the_same_graphs(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=4) for index in range(2)]
    first = tokens_of(generate(mesh, bound, groups, GREEDY))
    for _ in range(10):
        bound.quiesce()
        bound.bind(mesh.actor.publish(lambda views: None))
        assert tokens_of(generate(mesh, bound, groups, GREEDY)) == first


def test_keys_and_values_are_the_devices_again_after_a_generation(mesh, engine, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(2)]
    sampling = dataclasses.replace(SAMPLING, max_response_tokens=200)
    generate(mesh, bound, groups, sampling)
    before, seen, ledger = used_bytes(), [], []

    def look():
        seen.append(used_bytes())
        ledger.append(ledger_bytes(mesh.session, "rollout_kv"))

    outcome = bound.watch(start(bound, groups, sampling, snapshot=mesh.actor.snapshot), on_samples=look)
    assert outcome.error is None
    assert ledger[0] > 0
    if engine == "vllm":
        assert ledger[0] == pytest.approx(KV_GIB * GIB, rel=0.02)
        assert seen[0] - before > 0.9 * KV_GIB * GIB
    assert ledger_bytes(mesh.session, "rollout_kv") == 0
    assert used_bytes() - before < 256 << 20
    assert bound.quiesce(leave=False).released_bytes == 0


def test_a_neighbour_that_takes_memory_meanwhile_disturbs_nothing(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(2)]
    taken = []

    def take():
        if not taken:
            taken.append(torch.zeros(2 * KV_GIB * GIB, dtype=torch.uint8, device="cuda:0"))

    command = start(bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=200), snapshot=mesh.actor.snapshot)
    assert bound.watch(command, on_samples=take).error is None
    taken.clear()
    torch.cuda.empty_cache()
    assert len(generate(mesh, bound, groups).samples) == 16


def test_time_is_prefills_or_decodes_and_steps_are_counted(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=4) for index in range(3)]
    result = generate(mesh, bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=100)).value(
        "generate", work.GenerateResult)
    print(f"\n{result.decode_steps} steps, {1000 * result.decode_s / result.decode_steps:.2f} ms each, "
          f"{result.decode_rows / result.decode_steps:.1f} rows; prefill {result.prefill_s:.3f} s")
    assert 50 <= result.decode_steps <= 300
    assert result.decode_steps <= result.decode_rows <= 12 * result.decode_steps


def test_killed_and_started_again_it_binds_the_same_bytes(mesh, engine, replica):
    """The last one: it ends the replica of this module."""
    group = mesh.prompts.group("image", samples=1)
    replica.client.bind(mesh.actor.snapshot)
    before, bytes_before = tokens_of(generate(mesh, replica.client, [group], GREEDY)), slab_hash(mesh)
    command = start(replica.client, [mesh.prompts.group("text", index, samples=8) for index in range(2)],
                    dataclasses.replace(SAMPLING, max_response_tokens=1500), snapshot=mesh.actor.snapshot)
    del command
    replica.process.kill()
    replica.process.wait()
    assert slab_hash(mesh) == bytes_before
    with serving(engine, mesh) as (client, _):
        client.open_run()
        assert client.bind(mesh.actor.snapshot).inodes == mesh.actor.inodes_of_replica
        assert slab_hash(mesh) == bytes_before
        assert tokens_of(generate(mesh, client, [group], GREEDY)) == before
        client.quiesce()
        assert ledger_bytes(mesh.session, "rollout_kv") == 0
