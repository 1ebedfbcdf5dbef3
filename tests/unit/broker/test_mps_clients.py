"""Who is still a client of the mesh's MPS servers, and a fence that waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fake_mps
import pytest

from rollplex.broker.engine import Custody
from rollplex.broker.mps_clients import MpsClients, client_list
from rollplex.broker.records import NoVault
from rollplex.broker.sessions import NoConnection
from rollplex.core.config import MeshSection
from rollplex.core.errors import Aborted
from rollplex.core.leases import LeaseMode
from rollplex.memory.host_driver import sealed_memfd
from rollplex.memory.slab import Slab


@pytest.fixture
def daemon():
    """(control command, pipe directory, log directory) of a stand-in that answers."""
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        pipe, logs = Path(folder, "mps"), Path(folder, "logs")
        pipe.mkdir()
        logs.mkdir()
        command = fake_mps.install(Path(folder, "bin"))
        variables = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        process = subprocess.Popen([command, "-f"], env=variables)
        while not (pipe / "control").exists():
            assert process.poll() is None
            time.sleep(0.01)
        (logs / "servers").write_text("71 ACTIVE\n")
        yield str(command), pipe, logs
        process.kill()
        process.wait()


async def test_clients_are_those_of_every_server(daemon):
    command, pipe, logs = daemon
    clients = MpsClients(command, pipe)
    assert not await clients.has(4321)
    (logs / "clients").write_text("1234\n4321\n")
    assert await clients.has(4321)
    assert not await clients.has(432)
    (logs / "servers").write_text("")
    assert not await clients.has(4321)
    assert "get_client_list 71" in (logs / "commands").read_text()


async def test_without_a_daemon_there_is_no_client_and_without_an_answer_there_may_be_one(tmp_path):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o700)
    clients = MpsClients(str(silent), tmp_path)
    assert not await clients.has(1)
    (tmp_path / "control").touch()
    assert await clients.has(1)
    assert await MpsClients(str(tmp_path / "nothing"), tmp_path).has(1)


def test_only_a_mesh_with_a_daemon_has_a_list(tmp_path):
    def made(**keys):
        return client_list(MeshSection(runtime_dir=tmp_path, **keys), lambda command: f"/bin/{command}")

    assert made() is None and made(devices="cuda", sharing="time-slice") is None
    assert isinstance(made(devices="cuda"), MpsClients)
    assert client_list(MeshSection(runtime_dir=tmp_path, devices="cuda"), lambda command: None) is None


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


async def vanished(custody, child):
    """A slab whose writer, `child`, has died without a goodbye, another session, and the dead one's pid."""
    gone, _ = custody.hello("trainer-0", "trainer", child.pid, os.pidfd_open(child.pid), NoConnection())
    fd = sealed_memfd("state", 1000)
    ticket = custody.announce(gone.secret, Slab("state", "optimizer_state", "", "host", 1000))
    await custody.deposit(gone, ticket, fd)
    await custody.acquire(gone.secret, "state", LeaseMode.WRITE, None, None)
    child.kill()
    child.wait()
    custody.disconnect(gone, orderly=False)
    me, _ = custody.hello("trainer-1", "trainer", os.getpid(), os.pidfd_open(os.getpid()), NoConnection())
    return me, child.pid


async def test_a_dead_writer_is_gone_when_its_mps_client_is(daemon, child):
    command, pipe, logs = daemon
    custody = Custody(NoVault(), host_limit_bytes=0, fence_timeout_s=30.0, clients=MpsClients(command, pipe))
    me, pid = await vanished(custody, child)
    (logs / "clients").write_text(f"{pid}\n")
    waiting = asyncio.create_task(custody.acquire(me.secret, "state", LeaseMode.WRITE, None, None))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    (logs / "clients").write_text("")
    lease, *_ = await asyncio.wait_for(waiting, 20)
    assert lease.mode is LeaseMode.WRITE
    assert custody.sessions.former == []
    custody.close()


async def test_a_client_that_stays_is_not_fenced(daemon, child):
    command, pipe, logs = daemon
    custody = Custody(NoVault(), host_limit_bytes=0, fence_timeout_s=0.3, clients=MpsClients(command, pipe))
    me, pid = await vanished(custody, child)
    (logs / "clients").write_text(f"{pid}\n")
    with pytest.raises(Aborted, match="MPS server has it as a client") as refused:
        await custody.acquire(me.secret, "state", LeaseMode.WRITE, None, None)
    assert refused.value.reason == "NOT_FENCED"
    assert [former.pid for former in custody.sessions.former] == [pid]
    custody.close()
