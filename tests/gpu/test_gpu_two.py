"""Two GPUs of one host: one maps and writes the other's slabs, ranks meet over NCCL, and training at TP 2 is training at TP 1."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_rig import broker, connect
from gpu_marks import NEEDS_TWO_GPUS
from tiny_checkpoint import PromptMaker, save_tiny
from trainer_ranks import distance, three_updates, trainer_ranks

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.placement import Placement
from rollplex.data.processor import PromptProcessor
from rollplex.memory import views
from rollplex.memory.drivers import driver_of
from rollplex.trainer.config import TrainerConfig, TrainerSection

pytestmark = [*NEEDS_TWO_GPUS, pytest.mark.timeout(600)]
ELEMENTS = 256 << 20
"""Of bfloat16: a slab of 512 MiB."""


@pytest.fixture
def peer_slab():
    """On GPU 1, mapped in this process, whose GPU is 0: driver, reservation, handle, and the slab as bfloat16."""
    torch.cuda.set_device(0)
    driver, size = driver_of("cuda:1"), 2 * ELEMENTS
    reservation, handle = driver.reserve(size), driver.create(size, "peer")
    base = views.reserved_tensor(driver, reservation, size)
    driver.map(reservation, handle, writable=True)
    yield SimpleNamespace(driver=driver, reservation=reservation, handle=handle,
                          tensor=views.tensor(base, Placement.contiguous("peer", 0, (ELEMENTS,), "bfloat16")))
    driver.free(reservation)
    driver.release(handle)


def test_one_gpu_casts_into_the_others_slab(peer_slab):
    """As the streamed update does. Written by GPU 0, read by GPU 1, through new pages and back."""
    slab, tensor = peer_slab, peer_slab.tensor
    assert tensor.device == torch.device("cuda:1")
    assert not tensor.any()
    values = torch.randn(ELEMENTS, device="cuda:0")
    expected = values.bfloat16().to("cuda:1")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        began = time.perf_counter()
        tensor.copy_(values, non_blocking=True)
        torch.cuda.synchronize(0)
        seconds.append(time.perf_counter() - began)
    reaches = torch.cuda.can_device_access_peer(0, 1)
    print(f"\nGPU 0 reaches GPU 1: {reaches}; float32 cast into the peer's slab as bfloat16: "
          f"{2 * ELEMENTS / min(seconds) / 1e9:.0f} GB/s written")
    assert torch.equal(tensor, expected)
    other = slab.driver.create(2 * ELEMENTS, "other")
    slab.driver.map(slab.reservation, other, writable=True)
    assert not tensor.any()
    slab.driver.unmap(slab.reservation)
    slab.driver.map(slab.reservation, slab.handle, writable=False)
    assert torch.equal(tensor, expected)
    slab.driver.release(other)


def test_the_others_slab_is_read_from_here_too(peer_slab):
    """As a replica that copies a snapshot does; and what another process wrote is there."""
    fd = peer_slab.driver.export(peer_slab.handle)
    code = """
        import sys, torch
        from rollplex.core.placement import Placement
        from rollplex.memory import views
        from rollplex.memory.drivers import driver_of
        torch.cuda.set_device(1)
        driver, size = driver_of("cuda:1"), int(sys.argv[2])
        reservation = driver.reserve(size)
        base = views.reserved_tensor(driver, reservation, size)
        driver.map(reservation, driver.import_fd(int(sys.argv[1]), size), writable=True)
        base.fill_(5)
        torch.cuda.synchronize()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(fd), str(2 * ELEMENTS)], pass_fds=[fd], check=True)
    here = torch.empty(2 * ELEMENTS, dtype=torch.uint8, device="cuda:0")
    here.copy_(peer_slab.tensor.view(torch.uint8))
    assert bool((here == 5).all())


def test_a_slab_is_copied_from_the_others(peer_slab):
    """As a replica with GPUs of its own copies the actor: from pages that may only be read, into some that GPU 1 cannot touch."""
    values = torch.randint(0, 256, (2 * ELEMENTS,), dtype=torch.uint8, device="cuda:1")
    peer_slab.tensor.view(torch.uint8).copy_(values)
    torch.cuda.synchronize(1)
    driver, size = driver_of("cuda:0"), 2 * ELEMENTS
    peer_slab.driver.map(peer_slab.reservation, peer_slab.handle, writable=False)
    reservation, handle = driver.reserve(size), driver.create(size, "own")
    try:
        own = views.reserved_tensor(driver, reservation, size)
        driver.map(reservation, handle, writable=True)
        began = time.perf_counter()
        driver.copy(own, peer_slab.tensor.view(torch.uint8))
        torch.cuda.synchronize(0)
        print(f"\na slab copied from the peer's: {size / (time.perf_counter() - began) / 1e9:.0f} GB/s")
        assert torch.equal(own, values.to("cuda:0"))
    finally:
        driver.free(reservation)
        driver.release(handle)


RANK = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from rollplex.core.errors import RollplexError
from rollplex.core.phases import Phase
from rollplex.engine.communicator import Communicator
rank, dies = int(sys.argv[1]), sys.argv[3] == "dies"
communicator = Communicator("trainer", rank, 2, Path(sys.argv[2]), timeout_s=60, device=f"cuda:{rank}")
for epoch in (1, 2):
    communicator.announce(epoch)
    communicator.enter(epoch)
    with communicator.together(Phase.UPDATE, "measure_gradient"):
        said = communicator.all_gather({"rank": rank})
        total = torch.full((1 << 20,), float(rank + 1), device=f"cuda:{rank}")
        dist.all_reduce(total)
        assert float(total.mean()) == 3.0, total
answer = {"said": said, "reason": None}
if dies and rank == 1:
    print(json.dumps(answer), flush=True)
    time.sleep(3)
    os._exit(1)
if dies:
    began = time.monotonic()
    try:
        with communicator.together(Phase.SUFFIX, "train_suffix"):
            for _ in range(3):
                dist.all_reduce(total)
            torch.cuda.synchronize()
    except RollplexError as error:
        answer |= {"reason": error.reason, "rank": error.metadata.get("rank"), "seconds": time.monotonic() - began}
communicator.close()
print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("end", ["lives", "dies"])
def test_ranks_meet_again_and_a_death_ends_the_others_collective(tmp_path, end):
    """Two epochs; then a rank dies, whose peer waits in a kernel."""
    import json

    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path), end], stdout=subprocess.PIPE, text=True)
             for rank in range(2)]
    try:
        outputs = [json.loads(process.communicate(timeout=150)[0].splitlines()[-1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert outputs[0]["said"] == outputs[1]["said"] == [{"rank": 0}, {"rank": 1}]
    if end == "dies":
        print(f"\nthe death was told after {outputs[0]['seconds']:.1f} s")
        assert (outputs[0]["reason"], outputs[0]["rank"]) == ("PEER_LOST", "1")
        assert outputs[0]["seconds"] < 50


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[SimpleNamespace]:
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("m"), devices="cuda", sharing="time-slice",
                          collective_timeout_s=240.0)
    section.runtime_dir.chmod(0o700)
    with broker(section), connect(section, "coordinator", "coordinator") as session:
        def deposit(name: str, fd: int, size_bytes: int) -> object:
            return session.deposit(name, fd, object_class="media", run="contract")

        prompts = PromptMaker(PromptProcessor.load(checkpoint, max_prompt_tokens=2048), deposit)
        groups = [prompts.group(kind, index) for index, kind in enumerate(["text", "image", "video", "mixed"])]
        configuration = TrainerConfig(model=ModelSection(checkpoint=checkpoint), mesh=section, trainer=TrainerSection(
            logprob_chunk_tokens=8, offload_pool_bytes=8 << 20, check_hashes=True))
        yield SimpleNamespace(section=section, config=configuration, session=session, groups=groups)


def ranks(mesh, train_tp: int, rollout_tp: int, folder, shared: bool = False):
    section = replace(mesh.section, train_tensor_parallel=train_tp, rollout_tensor_parallel=rollout_tp, data_parallel=shared)
    return trainer_ranks(replace(mesh.config, mesh=section), mesh.session, f"two-{train_tp}-{rollout_tp}", folder)


@pytest.fixture(scope="module")
def of_one_rank(mesh, tmp_path_factory):
    with ranks(mesh, 1, 1, tmp_path_factory.mktemp("one")) as alone:
        return three_updates(alone, mesh.groups)


@pytest.mark.parametrize(("rollout_tp", "shared"), [(1, False), (2, False), (1, True)])
def test_updates_at_tp_2_equal_one_gpus(mesh, of_one_rank, rollout_tp, shared, tmp_path):
    """Teacher-forced, float32: 1e-3 of the update's norm. One actor on each GPU; at TP_rollout 1 both hold the same bytes, and
    may share groups out (`shared`)."""
    start, expected, expected_norms = of_one_rank
    with ranks(mesh, 2, rollout_tp, tmp_path, shared) as group:
        before, found, norms = three_updates(group, mesh.groups)
        rows = [row for row in mesh.session.ledger().rows if row.object_class == "actor_snapshot"]
        assert sorted((row.device, row.role, row.slab_count) for row in rows) == [
            ("cuda:0", "trainer", 1), ("cuda:1", "trainer", 1)]
        assert {row.size_bytes for row in rows} == {group.layout.size_bytes}
        again = group.iterate(mesh.groups, 3)
        assert all(result.finite for result in again)
    assert all((before[name] == start[name]).all() for name in start)
    error = distance(found, expected, start)
    print(f"\nTP 2 over rollout TP {rollout_tp}{', data parallel' * shared}, float32, two GPUs against one: "
          f"||dA - dB|| / ||dA|| = {error:.1e}")
    assert error <= 1e-3
    assert norms == pytest.approx(expected_norms, rel=1e-3)
