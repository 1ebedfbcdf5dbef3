"""A device's budget at the broker, and its ledger held against the driver's figure. On host devices the budget is as real."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollplex.broker.engine import Custody
from rollplex.broker.hbm import HbmBudget
from rollplex.broker.nvml import NvmlMeter
from rollplex.broker.records import NoVault
from rollplex.broker.sessions import NoConnection
from rollplex.core.config import AblationConfig
from rollplex.core.errors import OutOfMemory
from rollplex.core.memory_plan import Choice, Plan, make_plan
from rollplex.core.memory_sizes import GIB, PlanInput, Sizes, Work
from rollplex.core.phases import Phase
from rollplex.core.residency import RUNTIME, PlannedBytes
from rollplex.core.topology import Topology
from rollplex.core.work import ResidencyEntry
from rollplex.memory.host_driver import sealed_memfd
from rollplex.memory.slab import LedgerRow, Slab
from rollplex_client.cli.published import model_shapes

ORDER = (Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE, Phase.IDLE)


class Meter:
    """The driver's figures, as a test sets them."""

    def __init__(self, **used: int):
        self.used, self.total = used, 1000
        self.strangers = 0
        """Of what is used, bytes of a process that is none of the mesh's."""

    def used_bytes(self, device):
        return self.used.get(device.replace(":", "_"))

    def process_bytes(self, device):
        used = self.used_bytes(device)
        return None if used is None else {os.getpid(): used - self.strangers, 1: self.strangers}

    def total_bytes(self, device):
        return self.total if device.startswith("cuda:") else None


class Rig:
    def __init__(self, budget: HbmBudget):
        self.custody = Custody(NoVault(), host_limit_bytes=0, budget=budget)
        self.session, _ = self.custody.hello("trainer-0", "trainer", os.getpid(), os.pidfd_open(os.getpid()), NoConnection())

    def create(self, name, object_class, device, size):
        ticket = self.custody.announce(self.session.secret, Slab(name, object_class, "", device, size))
        if device.startswith("host"):
            asyncio.run(self.custody.deposit(self.session, ticket, sealed_memfd(name, size)))

    def report(self, object_class, size, device="host:0", residency="hbm", peak=0):
        self.custody.report(self.session.secret, (
            ResidencyEntry(object_class, "trainer", device, residency, size, peak or size),))

    def enter(self, phase, planned=(), iteration=0, relaxed=(), run="r"):
        return self.custody.enter_phase(run, iteration, phase, planned, tuple(relaxed))


@pytest.fixture
def rig():
    made = []

    def make(limit=0, slack=0, meter=None):
        made.append(Rig(HbmBudget(limit, slack, meter) if meter else HbmBudget(limit, slack)))
        return made[-1]

    yield make
    for item in made:
        item.custody.close()


def test_a_slab_over_the_budget_is_refused_with_the_table(rig):
    mesh = rig(limit=10_000)
    mesh.create("actor", "actor_snapshot", "host:0", 6000)
    mesh.report("boundary_trainer", 3000)
    with pytest.raises(OutOfMemory, match="2,000 bytes for slab more do not fit: 9,000 of 10,000 bytes of host:0") as caught:
        mesh.create("more", "gradients", "host:0", 2000)
    assert caught.value.reason == "OUT_OF_DEVICE_MEMORY"
    assert "boundary_trainer" in str(caught.value) and "actor_snapshot" in str(caught.value)
    mesh.create("more", "gradients", "host:0", 1000)
    mesh.create("elsewhere", "gradients", "host:1", 9000)
    mesh.create("pinned", "optimizer_state", "host", 90_000)


def test_announced_slabs_count_before_they_are_there(rig):
    mesh = rig(limit=10_000)
    mesh.create("one", "gradients", "cuda:0", 6000)
    with pytest.raises(OutOfMemory):
        mesh.create("two", "gradients", "cuda:0", 6000)


def test_without_a_budget_the_card_is_the_limit_and_a_host_device_has_none(rig):
    mesh = rig(meter=Meter())
    with pytest.raises(OutOfMemory, match="of 1,000 bytes of cuda:0"):
        mesh.create("one", "actor_snapshot", "cuda:0", 1001)
    mesh.create("two", "actor_snapshot", "host:0", 1001)


def test_a_phase_counts_what_is_held_or_planned(rig):
    mesh = rig(limit=10_000)
    mesh.create("actor", "actor_snapshot", "host:0", 6000)
    planned = [PlannedBytes("actor_snapshot", "host:0", 6000), PlannedBytes("rollout_kv", "host:0", 4000)]
    assert mesh.enter(Phase.OVERLAP, planned) == ()
    mesh.report("boundary_trainer", 500)
    with pytest.raises(OutOfMemory, match="phase suffix does not fit host:0: 10,500 bytes") as caught:
        mesh.enter(Phase.SUFFIX, [PlannedBytes("gradients", "host:0", 4000)])
    rows = {line.split()[0]: line.split()[1:] for line in str(caught.value).splitlines()[2:]}
    assert rows == {"actor_snapshot": ["6,000", "0", "6,000"], "boundary_trainer": ["500", "0", "500"],
                    "gradients": ["0", "4,000", "4,000"]}
    assert mesh.custody.ledger.phase is Phase.OVERLAP, "a phase that was refused has not begun"
    mesh.report("boundary_trainer", 0)
    mesh.create("much", "actor_snapshot", "host:0", 4000)
    assert mesh.enter(Phase.IDLE, run="") == ()


def test_relaxed_classes_are_the_runs_until_it_ends(rig):
    mesh = rig()
    mesh.create("state", "optimizer_state", "host:0", 10)
    assert mesh.enter(Phase.OVERLAP, relaxed=["optimizer_state"]) == ()
    assert mesh.enter(Phase.SUFFIX, relaxed=["optimizer_state"]) == ()
    assert mesh.enter(Phase.IDLE, run="", iteration=-1) == ()
    assert mesh.enter(Phase.OVERLAP, run="next") == (), "as the run before it left it"
    assert mesh.enter(Phase.SUFFIX, run="next") == ("optimizer_state: 10 bytes hbm on host:0 in phase overlap",)


def plan(**changes) -> Plan:
    """A published shape cut to what a test can hold: every class of the ledger in its true proportion."""
    shapes = replace(model_shapes("Qwen2.5-VL-3B"), layer_count=1, vocab_size=512)
    base = {"shapes": shapes, "topology": Topology(), "gpus": 1, "hbm_bytes": 100 * GIB, "host_bytes": 100 * GIB,
            "runtime_bytes": 0, "work": Work(groups=8, samples=8, prompt_tokens=512, response_tokens=64, micro_batch_samples=2,
                                             chunk_elements=1 << 16)}
    return make_plan(PlanInput(**(base | changes)), Choice("hbm", "pinned", "recompute", "recompute"))


def walk(mesh: Rig, found: Plan) -> None:
    """One iteration's barriers, and before it the slabs that stand the whole time."""
    if found.given.ablation.no_state_offload:
        mesh.create("state", "optimizer_state", "host:0", found.needs(Phase.OVERLAP)["optimizer_state"])
    mesh.create("actor", "actor_snapshot", "host:0", Sizes(found.given).shared_snapshot)
    if found.given.ablation.no_weight_sharing:
        mesh.create("copy", "actor_snapshot", "host:0", Sizes(found.given).rollout_weights)
    for phase in ORDER:
        assert mesh.enter(phase, found.planned(phase), relaxed=found.relaxed) == ()


@pytest.mark.parametrize(("name", "reason"), [
    ("no_state_offload", "OUT_OF_DEVICE_MEMORY"), ("rollout_resident", "PHASE_OVER_BUDGET"),
    ("unchunked_optimizer", "PHASE_OVER_BUDGET"), ("no_weight_sharing", "PHASE_OVER_BUDGET")])
def test_a_budget_that_full_rollplex_keeps_refuses_each_ablation(rig, name, reason):
    full = plan()
    budget = full.peak.total
    walk(rig(limit=budget), full)
    ablated = plan(ablation=AblationConfig(**{name: True}))
    with pytest.raises(OutOfMemory) as caught:
        walk(rig(limit=budget), ablated)
    assert caught.value.reason == reason
    assert f"{budget:,}" in str(caught.value) and "object class" in str(caught.value)


def test_the_ledger_against_the_driver(rig):
    meter = Meter(cuda_0=700)
    mesh = rig(slack=50, meter=meter)
    mesh.report("actor_snapshot", 100, "cuda:0")

    def iteration(number: int, *used: int) -> list[tuple[str, ...]]:
        """`used`: as each phase begins, which is as the one before it ends."""
        found = []
        for phase, size in zip(ORDER, used):
            meter.used = {"cuda_0": size}
            found.append(mesh.enter(phase, iteration=number))
        return found

    assert iteration(0, 100, 300, 280, 250) == [()] * 4
    assert iteration(1, 900, 350, 330, 300) == [()] * 4, "within the slack; IDLE has no first value"
    assert iteration(2, 100, 351, 280, 250) == [(), (
        "cuda:0 holds 251 bytes in phase overlap that the ledger does not explain, 51 more than in the first iteration "
        "(broker.unexplained_slack_gib)",), (), ()]
    peaks = {row.phase: row.size_bytes for row in mesh.custody.get_ledger("").peaks if row.object_class == RUNTIME}
    assert peaks == {"idle": 800, "overlap": 251, "suffix": 230, "update": 200}


def test_what_a_stranger_takes_fails_nothing_and_is_logged(rig, caplog):
    meter = Meter(cuda_0=300)
    mesh = rig(slack=50, meter=meter)
    mesh.report("actor_snapshot", 100, "cuda:0")

    def iteration(number):
        return [mesh.enter(phase, iteration=number) for phase in ORDER]

    assert iteration(0) == [()] * 4
    meter.used, meter.strangers = {"cuda_0": 800}, 500
    assert iteration(1) == [()] * 4
    assert "somebody else computes there" in caplog.text
    meter.used = {"cuda_0": 860}
    assert iteration(2)[1:] == [(
        f"cuda:0 holds 760 bytes in phase {phase} that the ledger does not explain, 560 more than in the first iteration "
        "(broker.unexplained_slack_gib)",) for phase in ("overlap", "suffix", "update")]


def test_growth_of_nobody_that_the_driver_names_is_no_violation(rig):
    meter = Meter(cuda_0=300)
    meter.process_bytes = lambda device: None
    mesh = rig(slack=50, meter=meter)
    mesh.report("actor_snapshot", 100, "cuda:0")
    for number in range(2):
        assert [mesh.enter(phase, iteration=number) for phase in ORDER] == [()] * 4
        meter.used = {"cuda_0": 900}


async def test_the_driver_is_asked_off_the_loop():
    asked = []
    meter = Meter(cuda_0=300)
    meter.used_bytes = lambda device: asked.append(threading.current_thread()) or 300
    custody = Custody(NoVault(), host_limit_bytes=0, budget=HbmBudget(0, 0, meter))
    session, _ = custody.hello("trainer-0", "trainer", os.getpid(), os.pidfd_open(os.getpid()), NoConnection())
    custody.report(session.secret, (ResidencyEntry("boundary_trainer", "trainer", "cuda:0", "hbm", 10, 10),))
    custody.enter_phase("r", 0, Phase.OVERLAP, readings=await custody.read_devices())
    assert asked and threading.main_thread() not in asked
    custody.close()


def test_another_run_starts_anew(rig):
    meter = Meter(cuda_0=700)
    mesh = rig(slack=50, meter=meter)
    mesh.report("boundary_trainer", 100, "cuda:0")
    mesh.enter(Phase.OVERLAP)
    mesh.enter(Phase.SUFFIX)
    meter.used = {"cuda_0": 800}
    mesh.enter(Phase.OVERLAP, run="next")
    assert mesh.enter(Phase.SUFFIX, run="next") == ()


def test_rows_say_where_the_bytes_are(rig):
    mesh = rig()
    mesh.create("gradients", "gradients", "host", 5)
    mesh.create("hot", "gradients", "host:0", 7)
    mesh.report("prefix_activations", 3, residency="pinned", peak=9)
    rows = mesh.custody.get_ledger("").rows
    assert {(row.object_class, row.device, row.residency, row.size_bytes) for row in rows} == {
        ("gradients", "host", "pinned", 5), ("gradients", "host:0", "hbm", 7), ("prefix_activations", "host:0", "pinned", 3)}
    assert LedgerRow("prefix_activations", "trainer", "host:0", "idle", 9, 0, "pinned") in mesh.custody.get_ledger("").peaks


class Nvml(SimpleNamespace):
    """pynvml's four names."""

    NVMLError = RuntimeError

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 3:
            raise RuntimeError("no such device")
        return f"gpu-{index}"

    def nvmlDeviceGetHandleByUUID(self, name):
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=7, usedGpuMemory=5), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self.used[handle], total=500)


@pytest.mark.parametrize(("visible", "used"), [(None, 10), ("2,1", 20), ("1,GPU-7", 11), ("GPU-7", 30)])
def test_nvml_counts_the_gpus_that_cuda_shows(visible, used, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = NvmlMeter(Nvml(used={"gpu-0": 10, "gpu-1": 11, "gpu-2": 20, "GPU-7": 30}))
    assert (meter.used_bytes("cuda:0"), meter.total_bytes("cuda:0")) == (used, 500)
    assert meter.process_bytes("cuda:0") == {7: 5} and meter.process_bytes("host:0") is None
    assert meter.used_bytes("host:0") is None and meter.used_bytes("cuda:9") is None
