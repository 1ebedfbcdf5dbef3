"""Devices, replicas and peers at every pair of degrees."""

from __future__ import annotations

import pytest

from rollplex.core.config import MeshSection
from rollplex.core.errors import BadInput
from rollplex.core.replicas import Replicas
from rollplex.core.topology import Topology, is_host

PAIRS = [(train, rollout) for train in (1, 2, 4, 8) for rollout in (1, 2, 4, 8) if train % rollout == 0]


def test_the_papers_shape():
    topology = Topology(8, 4)
    assert topology.replica_devices(0) == (0, 2, 4, 6)
    assert topology.replica_devices(1) == (1, 3, 5, 7)
    assert [topology.rollout_shard(device) for device in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert topology.peers(5) == (4, 5)


@pytest.mark.parametrize(("train", "rollout"), PAIRS)
def test_replicas_cover_the_devices_once_and_hold_every_shard(train, rollout):
    topology = Topology(train, rollout)
    replicas = [topology.replica_devices(replica) for replica in range(topology.replica_count)]
    assert sorted(device for devices in replicas for device in devices) == list(range(train))
    for devices in replicas:
        assert [topology.rollout_shard(device) for device in devices] == list(range(rollout))
    for device in range(train):
        assert topology.peers(device)[topology.part(device)] == device


@pytest.mark.parametrize(("train", "rollout"), [(1, 2), (3, 2), (0, 1), (4, 0), (6, 4)])
def test_what_does_not_nest_is_refused_with_the_numbers(train, rollout):
    with pytest.raises(BadInput, match=f"TP {train} and rollout at TP {rollout}"):
        Topology(train, rollout)


def test_a_reference_shares_groups_out_as_its_ranks_allow(tmp_path):
    def mesh(**sizes) -> MeshSection:
        given = {"train_tensor_parallel": 4, "rollout_tensor_parallel": 2, "data_parallel": True}
        return MeshSection(runtime_dir=tmp_path, **(given | sizes))

    assert mesh().replicas("trainer") == Replicas(4, 2)
    assert [mesh(reference_tensor_parallel=size).replicas("reference") for size in (1, 2, 4)] == [
        Replicas(1, 1), Replicas(2, 2), Replicas(4, 2)]
    assert mesh(data_parallel=False, reference_tensor_parallel=4).replicas("reference") == Replicas(4, 4)
    assert mesh(rollout_tensor_parallel=4).replicas("trainer") == Replicas(4, 4), "q is 1"
    with pytest.raises(ValueError, match="reference_tensor_parallel is 3"):
        mesh(reference_tensor_parallel=3)


def test_replicas_on_devices_of_their_own_come_after_the_trainers():
    topology = Topology(4, 2, own_replicas=3)
    assert (topology.device_count, topology.replica_count) == (10, 3)
    assert [topology.replica_devices(replica) for replica in range(3)] == [(4, 5), (6, 7), (8, 9)]
    assert [topology.source(replica) for replica in range(3)] == [(0, 2), (1, 3), (0, 2)]
    for replica in range(3):
        assert [topology.rollout_shard(device) for device in topology.source(replica)] == [0, 1]


@pytest.mark.parametrize(("train", "rollout"), PAIRS)
def test_a_replica_that_shares_reads_its_own_devices(train, rollout):
    topology = Topology(train, rollout)
    for replica in range(topology.replica_count):
        assert topology.source(replica) == topology.replica_devices(replica)


@pytest.mark.parametrize(("device", "expected"), [
    ("host", True), ("host:0", True), ("host:12", True), ("host:", False), ("host:x", False), ("cuda:0", False)])
def test_host_devices(device, expected):
    assert is_host(device) is expected
