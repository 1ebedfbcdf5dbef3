"""What only the `torch` engine shows: it decodes in this process, so its tensors can be looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from engine_rig import EngineClient

from rollplex.rpc.channel import sync_channel


@pytest.fixture
def decoder(bound):
    if not hasattr(bound.engine._tokens, "_decoder"):
        pytest.skip("another engine")
    return bound.engine._tokens._decoder


def mapped_ranges(inode: int) -> list[tuple[int, int, str]]:
    """(start, end, permissions) of this process's mappings of a file."""
    with Path("/proc/self/maps").open() as maps:
        lines = [line.split() for line in maps]
    found = [(fields[0].split("-"), fields[1]) for fields in lines if int(fields[4]) == inode]
    return [(int(start, 16), int(end, 16), permissions) for (start, end), permissions in found]


def test_every_parameter_lies_in_the_read_only_mapping_of_the_slab(mesh, bound, decoder):
    ((start, end, permissions),) = mapped_ranges(mesh.actor.inode)
    assert permissions == "r--s"
    parameters = decoder.prefill.parameters_by_name()
    assert len(parameters) == len(mesh.actor.layout.shards)
    for tensor in [*decoder.weights.values(), *parameters.values()]:
        assert start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= end


def test_addresses_survive_and_nothing_is_mapped_after_quiesce(mesh, bound, decoder):
    before = {name: tensor.data_ptr() for name, tensor in decoder.weights.items()}
    bound.quiesce()
    assert mapped_ranges(mesh.actor.inode) == []
    bound.bind(mesh.actor.publish(lambda views: None))
    assert {name: tensor.data_ptr() for name, tensor in decoder.weights.items()} == before
    assert len(mapped_ranges(mesh.actor.inode)) == 1


def test_the_process_serves_and_drains(mesh, tmp_path):
    """`python -m rollplex.rollout` as another replica of the same mesh."""
    config = tmp_path / "mesh.toml"
    config.write_text(f'[mesh]\nruntime_dir = "{mesh.section.runtime_dir}"\n[model]\ncheckpoint = "{mesh.checkpoint}"\n')
    command = [sys.executable, "-W", "ignore", "-m", "rollplex.rollout", "--config", str(config), "--replica", "1"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        address = mesh.section.address("rollout-1")
        with sync_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        client = EngineClient(address)
        assert client.joined.role == "rollout"
        assert client.joined.pid == process.pid
        client.open_run()
        assert client.bind(mesh.actor.snapshot).slab_inode == mesh.actor.inode
        client.quiesce()
        client.channel.close()
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
