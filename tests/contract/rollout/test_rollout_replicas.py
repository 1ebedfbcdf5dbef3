"""Replicas of several ranks, and several replicas: who maps which slab, and what a lost rank or leader leaves behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from contextlib import ExitStack

import pytest
from replica_rig import children, mapped_ranges, replica_process, wait_ended
from rollout_rig import SAMPLING, generate, start, tokens_of

from rollplex.core.errors import Aborted
from rollplex.core.topology import Topology

pytestmark = pytest.mark.ranks
LONG = dataclasses.replace(SAMPLING, max_response_tokens=1500)


@pytest.fixture(scope="module")
def leader(mesh):
    """(client, process) of a replica of two ranks, its run open."""
    with replica_process(mesh, Topology(2, 2), 0, "--set", "mesh.collective_timeout_s=4") as (client, process):
        client.open_run()
        yield client, process


def assert_works(mesh, client):
    client.bind(mesh.actor.snapshot)
    groups = [mesh.prompts.group("mixed", samples=2)]
    assert tokens_of(generate(mesh, client, groups)) == tokens_of(generate(mesh, client, groups))


def lose_rank(mesh, client, number: signal.Signals, worker: int) -> Aborted:
    """What the generation says whose worker gets the signal while it decodes."""
    groups = [mesh.prompts.group("text", index, samples=4) for index in range(3)]
    command, lost = start(client, groups, LONG, snapshot=mesh.actor.snapshot), []

    def lose() -> None:
        if not lost:
            lost.append(os.kill(worker, number))

    return client.watch(command, on_samples=lose).error


@pytest.mark.parametrize("engine_name", ["torch-tp2"], indirect=True, scope="module")
class TestRanks:
    def test_every_rank_maps_its_own_device_for_reading(self, mesh, leader):
        client, process = leader
        (worker,) = children(process.pid)
        bound = client.bind(mesh.actor.snapshot)
        assert bound.inodes == {"host:0": mesh.actor.inodes[0], "host:1": mesh.actor.inodes[1]}
        for pid, own, other in ((process.pid, 0, 1), (worker, 1, 0)):
            assert [permissions for *_, permissions in mapped_ranges(mesh.actor.inodes[own], pid)] == ["r--s"]
            assert mapped_ranges(mesh.actor.inodes[other], pid) == []
        client.quiesce()
        assert not any(mapped_ranges(inode, pid) for inode in mesh.actor.inodes for pid in (process.pid, worker))

    def test_the_mesh_sees_one_process(self, leader):
        client, process = leader
        assert (client.joined.pid, client.joined.rank, client.joined.tensor_parallel_size) == (process.pid, 0, 2)

    def test_a_rank_lost_between_commands_is_made_anew_by_bind(self, mesh, leader):
        client, process = leader
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert_works(mesh, client)
        client.quiesce()

    @pytest.mark.parametrize(("number", "words"), [
        (signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "does not answer")])
    def test_a_rank_lost_while_decoding_is_named(self, mesh, leader, number, words):
        client, process = leader
        client.bind(mesh.actor.snapshot)
        started = time.monotonic()
        error = lose_rank(mesh, client, number, children(process.pid)[0])
        assert isinstance(error, Aborted)
        assert (error.reason, error.metadata["rank"], error.metadata["phase"]) == ("RANK_LOST", "1", "decode")
        assert f"rollout-0.1 (rank 1 of 2) {words} during decode" in str(error)
        assert time.monotonic() - started < 15
        assert children(process.pid) == []
        mesh.actor.publish(lambda views: None)  # refused while anybody leases a slab
        assert_works(mesh, client)
        client.quiesce()

    def test_no_worker_outlives_its_leader(self, mesh, leader):
        client, process = leader
        client.bind(mesh.actor.snapshot)
        (worker,) = children(process.pid)
        pidfd = os.pidfd_open(worker)
        start(client, [mesh.prompts.group("text", index, samples=4) for index in range(3)], LONG, snapshot=mesh.actor.snapshot)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        wait_ended(pidfd, 5)
        mesh.actor.publish(lambda views: None)


@pytest.mark.parametrize("engine_name", ["torch-q2"], indirect=True, scope="module")
def test_replicas_of_one_rank_share_the_snapshot_and_drain(mesh):
    topology = mesh.actor.topology
    groups = [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "video"])]
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica_process(mesh, topology, number)) for number in range(topology.replica_count)]
        found = []
        for number, (client, process) in enumerate(replicas):
            assert (client.joined.role, client.joined.pid) == ("rollout", process.pid)
            client.open_run()
            assert client.bind(mesh.actor.snapshot).inodes == {f"host:{number}": mesh.actor.inodes[number]}
            found.append(tokens_of(generate(mesh, client, groups)))
            client.quiesce()
        assert found[0] == found[1]
        for _, process in replicas:
            process.terminate()
        assert [process.wait(20) for _, process in replicas] == [0, 0]
