"""`python -m rollplex.reference`, killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys

import grpc
import pytest
from engine_rig import EngineClient

from rollplex.reference.server import PROCESS
from rollplex.rpc.channel import sync_channel


@pytest.fixture
def start(mesh, tmp_path):
    config = tmp_path / "mesh.toml"
    config.write_text(f'[mesh]\nruntime_dir = "{mesh.section.runtime_dir}"\n[model]\ncheckpoint = "{mesh.checkpoint}"\n')
    processes = []

    def run() -> tuple[subprocess.Popen, EngineClient]:
        command = [sys.executable, "-W", "ignore", "-m", "rollplex.reference", "--config", str(config)]
        processes.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
        with sync_channel(mesh.section.address(PROCESS)) as channel:
            grpc.channel_ready_future(channel).result(60)
        return processes[-1], EngineClient(mesh.section.address(PROCESS))

    yield run
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_killed_reference_comes_back_to_its_weights(mesh, start):
    process, client = start()
    client.open_run()
    inode = client.bind(0).inodes["host"]
    client.channel.close()
    process.kill()
    process.wait()
    (slab,) = mesh.session.list_slabs("reference/weights/")
    assert slab.inode == inode
    process, client = start()
    assert client.joined.open_run == ""
    client.open_run()
    assert client.bind(0).inodes["host"] == inode
    assert mesh.session.list_slabs("reference/weights/") == (slab,)
    client.channel.close()
    process.terminate()
    assert process.wait(20) == 0
