"""A device's budget over the broker's sockets."""

from __future__ import annotations

import errno

import pytest
from engine_rig import broker, connect

from rollplex.core.config import MeshSection
from rollplex.core.errors import OutOfMemory
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.memory import client
from rollplex.memory.host_driver import HostDriver

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


class Card(HostDriver):
    """A device whose memory is full, whatever the broker's budget says."""

    def __init__(self, full: bool):
        self.full, self.made = full, 0

    def create(self, size_bytes, name):
        self.made += 1
        if self.full:
            raise OSError(errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY")
        return super().create(size_bytes, name)


def test_memory_is_made_once_the_broker_has_room_and_a_real_shortage_shows_the_table(session, monkeypatch):
    session.create("held", object_class="actor_snapshot", device="host:2", size_bytes=KIB - 100)
    card = Card(full=True)
    monkeypatch.setattr(client, "driver_of", lambda device: card)
    with pytest.raises(OutOfMemory, match="1,024 bytes of host:2"):
        session.create("over", object_class="gradients", device="host:2", size_bytes=101)
    assert card.made == 0
    with pytest.raises(OutOfMemory, match=r"host:2 has no room for the 100 bytes of slab full.*\n.*object class") as caught:
        session.create("full", object_class="gradients", device="host:2", size_bytes=100)
    assert caught.value.reason == "OUT_OF_DEVICE_MEMORY" and "actor_snapshot" in str(caught.value)
    card.full = False
    session.create("room", object_class="gradients", size_bytes=100)
    assert [slab.name for slab in session.list_slabs("room")] == ["room"]
    assert session.ledger().counts["slabs"] == len(session.list_slabs())
