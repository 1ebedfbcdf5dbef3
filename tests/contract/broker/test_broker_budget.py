"""A device's budget over the broker's sockets."""

from __future__ import annotations

import pytest
from engine_rig import broker, connect

from rollplex.core.config import MeshSection
from rollplex.core.errors import OutOfMemory
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes

KIB = 1 << 10


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"), hbm_budget_gib=1 / (1 << 20))
    section.runtime_dir.chmod(0o700)
    with broker(section), connect(section, "trainer-0", "trainer") as session:
        yield session


def test_slabs_and_phases_are_refused_with_their_tables(session):
    session.create("actor", object_class="actor_snapshot", device="host:0", size_bytes=KIB - 100)
    with pytest.raises(OutOfMemory, match=r"1,024 bytes of host:0 are taken .*\nobject class") as caught:
        session.create("more", object_class="gradients", device="host:0", size_bytes=101)
    assert (caught.value.reason, caught.value.metadata["device"]) == ("OUT_OF_DEVICE_MEMORY", "host:0")
    session.create("parked", object_class="gradients", size_bytes=100 * KIB)
    needs = [PlannedBytes("gradients", "host:0", 101)]
    with pytest.raises(OutOfMemory, match=r"phase suffix does not fit host:0: 1,025 bytes"):
        session.enter_phase("r", 0, Phase.SUFFIX, needs)
    assert session.enter_phase("r", 0, Phase.SUFFIX, [PlannedBytes("gradients", "host:0", 100)]) == ()


def test_relaxed_classes_and_residency_cross_the_wire(session):
    session.create("state", object_class="optimizer_state", device="host:1", size_bytes=10)
    assert session.enter_phase("r", 1, Phase.OVERLAP, relaxed=["optimizer_state"]) == ()
    assert session.enter_phase("r", 1, Phase.SUFFIX, relaxed=["optimizer_state"]) == ()
    rows = {(row.object_class, row.device): row.residency for row in session.ledger().rows}
    assert rows["optimizer_state", "host:1"] == "hbm" and rows["gradients", "host"] == "pinned"
