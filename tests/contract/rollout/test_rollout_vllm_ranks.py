"""vLLM's own workers at TP 2, q = 2: each leases its device's slab by itself, and none is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from replica_rig import VLLM, children, mapped_ranges, replica_process, wait_ended
from rollout_rig import SAMPLING, generate, start

from rollplex.core.errors import Aborted

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")
pytestmark = [pytest.mark.ranks, pytest.mark.parametrize("engine_name", ["vllm-tp2-q2"], indirect=True, scope="module")]


@pytest.fixture(scope="module")
def leader(mesh):
    """(client, process) of replica 1, its run open."""
    with replica_process(mesh, mesh.actor.topology, 1, *VLLM) as (client, process):
        client.open_run()
        yield client, process


def descendants(pid: int) -> list[int]:
    """vLLM's workers may be below another child, such as multiprocessing's resource tracker beside them."""
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def holders(mesh, pids: list[int]) -> dict[int, list[int]]:
    """By device: who maps its slab, all of them for reading."""
    found = {device: [pid for pid in pids if mapped_ranges(inode, pid)] for device, inode in enumerate(mesh.actor.inodes)}
    permissions = {entry[2] for inode in mesh.actor.inodes for pid in pids for entry in mapped_ranges(inode, pid)}
    assert permissions <= {"r--s"}
    return found


def test_each_worker_maps_its_own_device_for_reading(mesh, leader):
    client, process = leader
    bound = client.bind(mesh.actor.snapshot)
    assert bound.inodes == mesh.actor.inodes_of_replica
    assert bound.bound_parameters == len(mesh.actor.layout.tensors)
    found = holders(mesh, [process.pid, *descendants(process.pid)])
    assert [len(found[device]) for device in range(4)] == [0, 1, 0, 1]
    assert found[1] != found[3]
    assert process.pid not in found[1] + found[3]
    assert len(generate(mesh, client, [mesh.prompts.group("video", samples=2)]).samples) == 2
    assert not [fd for fd in Path(f"/proc/{process.pid}/fd").iterdir() if "patches" in str(fd.readlink())]
    client.quiesce()
    assert not any(holders(mesh, [process.pid, *descendants(process.pid)]).values())


def test_a_lost_rank_is_named_and_made_anew_by_bind(mesh, leader):
    client, process = leader
    client.bind(mesh.actor.snapshot)
    (victim,) = holders(mesh, descendants(process.pid))[3]
    groups = [mesh.prompts.group("text", index, samples=4) for index in range(3)]
    long = dataclasses.replace(SAMPLING, max_response_tokens=1500)
    command, lost = start(client, groups, long, snapshot=mesh.actor.snapshot), []

    def lose() -> None:
        if not lost:
            lost.append(os.kill(victim, signal.SIGKILL))

    error = client.watch(command, on_samples=lose).error
    assert isinstance(error, Aborted)
    assert (error.reason, error.metadata["rank"]) == ("RANK_LOST", "1")
    assert "was killed by SIGKILL during decode" in str(error)
    mesh.actor.publish(lambda views: None)  # refused while anybody leases a slab
    client.bind(mesh.actor.snapshot)
    assert len(generate(mesh, client, groups).samples) == 12
    client.quiesce()


def test_no_worker_outlives_its_leader(mesh, leader):
    client, process = leader
    client.bind(mesh.actor.snapshot)
    pidfds = [os.pidfd_open(pid) for pid in descendants(process.pid)]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for pidfd in pidfds:
        wait_ended(pidfd, 20)
    mesh.actor.publish(lambda views: None)  # refused while anybody leases a slab
