"""Residency on a GPU: the reference's weights visit it, budgets are kept before CUDA sees them, the ledger against the driver.
What can, runs on a CPU too, so that nothing but the device is new on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import RUN, Loop, broker, connect, served
from gpu_marks import NEEDS_GPU, needs_gpu
from reference_rig import expected, materialize, respond, score
from tiny_checkpoint import PromptMaker, frozen_model, save_tiny, tensor_parallel

from rollplex.broker.hbm import HbmBudget
from rollplex.broker.nvml import NvmlMeter, device_meter
from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.errors import OutOfMemory
from rollplex.core.phases import Phase
from rollplex.data.processor import PromptProcessor
from rollplex.engine import release_cached, use_device
from rollplex.engine.hbm_share import bound_allocator
from rollplex.engine.prompts import PromptReader
from rollplex.memory.device_pages import DevicePages
from rollplex.memory.drivers import driver_of
from rollplex.reference.config import ReferenceConfig, ReferenceSection
from rollplex.reference.paging import PagedWeights
from rollplex.reference.server import build_engine
from rollplex.reference.servicer import add_reference

GIB = 1 << 30
NEARLY = 64 << 20
"""What allocators and contexts may keep or take meanwhile."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"), devices="cuda", hbm_budget_gib=8.0)
    section.runtime_dir.chmod(0o700)
    loop = Loop()
    with tensor_parallel(), broker(section), connect(section, "coordinator", "coordinator") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
        oracle = frozen_model(checkpoint)

        def deposit(name: str, fd: int, size_bytes: int) -> object:
            return session.deposit(name, fd, object_class="media", run=RUN)

        yield SimpleNamespace(section=section, checkpoint=checkpoint, session=session, loop=loop, oracle=oracle,
                              reader=PromptReader(session, processor, oracle.config), prompts=PromptMaker(processor, deposit))


def serve(mesh, weights: str):
    config = ReferenceConfig(model=ModelSection(checkpoint=mesh.checkpoint), mesh=mesh.section,
                             reference=ReferenceSection(suffix_tokens=24, weights=weights))
    return served(mesh.loop, mesh.section, "reference-0", build_engine(config), add_reference)


@needs_gpu
@pytest.mark.parametrize("weights", ["paged", "resident"])
def test_scores_are_the_cpus_in_float32(mesh, weights):
    groups = [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "image", "video", "mixed"])]
    with serve(mesh, weights) as client:
        client.open_run()
        materialize(client, groups)
        scored = iter(score(client, [respond(group) for group in groups]).samples)
        for group in groups:
            for values in expected(mesh, group, respond(group)):
                np.testing.assert_allclose(np.array(next(scored).logprobs), values, atol=1e-4)
        rows = {(row.device, row.residency) for row in mesh.session.ledger().rows if row.object_class == "reference_weights"}
        assert rows == {("host", "pinned") if weights == "paged" else ("cuda:0", "hbm")}
        peaks = {(row.device, row.residency) for row in mesh.session.ledger().peaks if row.object_class == "reference_weights"}
        assert ("cuda:0", "hbm") in peaks
    for slab in mesh.session.list_slabs("reference/"):
        mesh.session.delete(slab.name)


class BigSource:
    """What PagedWeights asks of a ReferenceWeights, of that size and without a broker."""

    device, inode, was_loaded, held = "host", 1, True, True

    def __init__(self, size_bytes: int) -> None:
        self.layout = SimpleNamespace(size_bytes=size_bytes, placements=lambda slab: {}, training_views=lambda views: views)
        self.size_bytes = size_bytes
        self._pages = DevicePages(driver_of("host"), size_bytes)
        self._pages.back()
        self.address = self._pages._reservation.address
        self.weight_bytes().view(torch.int64).copy_(torch.arange(size_bytes // 8))

    def weight_bytes(self) -> torch.Tensor:
        return self._pages._base

    def open(self) -> None:
        """It always is."""

    def hold(self) -> None:
        """It always is mapped."""

    def close(self) -> None:
        self._pages.close()


def memory_in_use(device: str) -> int:
    """Of the device; on the host, what this process has mapped of shared memory."""
    if device == "host":
        status = Path("/proc/self/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem:"))
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize(("device", "size_bytes"), [("host", 128 << 20), pytest.param("cuda:0", GIB, marks=NEEDS_GPU)])
def test_pages_are_on_the_device_only_meanwhile(device, size_bytes):
    use_device(device)
    source = BigSource(size_bytes)
    paged = PagedWeights(source, driver_of(device))
    paged.open()
    base = paged._pages._base.view(torch.int64)
    before = memory_in_use(device)
    for _ in range(2):
        with paged.mapped():
            assert memory_in_use(device) >= before + size_bytes
            assert torch.equal(base[::1 << 20].cpu(), torch.arange(0, size_bytes // 8, 1 << 20))
            assert int(base[-1]) == size_bytes // 8 - 1
        assert memory_in_use(device) <= before + NEARLY
    paged.close()


@needs_gpu
def test_the_budget_refuses_before_cuda_is_asked(mesh):
    free_before, _ = torch.cuda.mem_get_info()
    with pytest.raises(OutOfMemory) as caught, connect(mesh.section, "trainer-0", "trainer") as trainer:
        trainer.create("too-much", object_class="actor_snapshot", device="cuda:0", size_bytes=9 * GIB)
    assert caught.value.reason == "OUT_OF_DEVICE_MEMORY"
    assert torch.cuda.mem_get_info()[0] >= free_before - NEARLY


@needs_gpu
def test_the_ledger_against_nvml(mesh):
    meter = device_meter()
    assert isinstance(meter, NvmlMeter), "nvidia-ml-py is part of the GPU environment"
    budget = HbmBudget(meter=meter)
    _, total = torch.cuda.mem_get_info()
    assert abs(budget.limit("cuda:0") - total) < 2 * GIB
    with connect(mesh.section, "trainer-0", "trainer") as trainer:
        trainer.create("one", object_class="actor_snapshot", device="cuda:0", size_bytes=GIB)
        before = budget.unexplained({"cuda:0": {"actor_snapshot": GIB}}, budget.read(["cuda:0"]))["cuda:0"]
        trainer.create("two", object_class="actor_snapshot", device="cuda:0", size_bytes=2 * GIB)
        after = budget.unexplained({"cuda:0": {"actor_snapshot": 3 * GIB}}, budget.read(["cuda:0"]))["cuda:0"]
        assert abs(after - before) < NEARLY
        mesh.session.enter_phase("r", 0, Phase.OVERLAP)
        mesh.session.enter_phase("r", 0, Phase.IDLE)
        noted = {row.phase: row.size_bytes for row in mesh.session.ledger().peaks if row.object_class == "runtime_buffers"}
        assert 0 < noted["overlap"] < total
        for name in ("one", "two"):
            trainer.delete(name)


@needs_gpu
def test_a_process_is_bounded_by_its_share():
    device = use_device("cuda:0")
    bound_allocator(device, budget_gib=8, share_gib=1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release_cached(device)
