"""CUDA slabs in the broker's custody: they outlive who made them, and the broker itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from gpu_marks import NEEDS_GPU

from rollplex.core.errors import BadInput
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab

pytestmark = NEEDS_GPU
SIZE = (64 << 20) + 100
NAME = "runs/r/actor/cuda:0"
MAKER = """
    import sys
    from pathlib import Path
    from rollplex.core.leases import LeaseMode
    from rollplex.core.placement import Placement
    from rollplex.memory.client import BrokerSession
    from rollplex.memory.drivers import driver_of
    from rollplex.memory.mapping import MappedSlab

    directory, name, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    session = BrokerSession.connect(f"unix:{directory}/broker.sock", directory / "handles.sock", process="trainer-0",
                                    role="trainer")
    session.create(name, object_class="actor_snapshot", device="cuda:0", size_bytes=size, run="r")
    lease = session.lease(name, LeaseMode.WRITE)
    mapped = MappedSlab(driver_of("cuda:0"), size)
    mapped.bind(lease, writable=True)
    tensor = mapped.tensor(Placement.contiguous(name, 0, (size,), "uint8"))
    assert not tensor.any(), "new slabs are zeros"
    tensor.fill_(7)
    mapped.close()
    lease.release()
    session.register_snapshot("r", [name], 0)
    {end}
"""


@pytest.fixture
def mesh():
    from broker_node import Node

    node = Node()
    node.start_keeper()
    node.start_broker()
    yield node
    node.stop()


def make(mesh, end: str) -> int:
    code = textwrap.dedent(MAKER).replace("{end}", end)
    return subprocess.run([sys.executable, "-c", code, str(mesh.directory), NAME, str(SIZE)], check=False).returncode


def values(mesh, session) -> list[int]:
    with session.lease(NAME, LeaseMode.READ, snapshot=0) as lease:
        mapped = MappedSlab(driver_of("cuda:0"), SIZE)
        try:
            mapped.bind(lease)
            return mapped.tensor(Placement.contiguous(NAME, 0, (SIZE,), "uint8")).unique().tolist()
        finally:
            mapped.close()


@pytest.mark.parametrize("end", ["session.close()", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_slab_outlives_its_maker_and_the_broker(mesh, end):
    mesh.session("coordinator", "coordinator").close()  # waits for the broker
    assert make(mesh, end) == (0 if "close" in end else -signal.SIGKILL)
    session = mesh.session("rollout-0", "rollout")
    assert values(mesh, session) == [7]
    mesh.broker.kill()
    mesh.broker.wait()
    mesh.start_broker()
    assert values(mesh, session) == [7]


def test_deleting_gives_the_memory_back(mesh):
    session = mesh.session()
    torch.zeros(1, device="cuda")
    free_before, _ = torch.cuda.mem_get_info()
    session.create("big", object_class="optimizer_state", device="cuda:0", size_bytes=1 << 30)
    assert free_before - torch.cuda.mem_get_info()[0] >= 1 << 30
    session.delete("big")
    assert torch.cuda.mem_get_info()[0] >= free_before - (32 << 20)


def test_a_memfd_is_no_cuda_slab(mesh, tmp_path):
    session = mesh.session()
    with (tmp_path / "file").open("wb") as file, pytest.raises(BadInput, match="no CUDA allocation"):
        session.deposit("x", file.fileno(), object_class="optimizer_state", device="cuda:0", size_bytes=100)
