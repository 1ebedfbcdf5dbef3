"""Copies of the actor on devices of rollout's own, over a real broker: made, brought on, torn, made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_rig import broker, connect

from rollplex.core.config import MeshSection
from rollplex.core.errors import Aborted, WrongState
from rollplex.core.ids import actor_slab, copy_name
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.rollout import copies as copies_module
from rollplex.rollout.copies import ShardCopy, SnapshotCopies

SIZE = 10_000
RUN = "run"
SHARDS = (ShardCopy("host:0", "host:4"), ShardCopy("host:2", "host:5"))


class Context:
    aborts_after = 1000

    def check(self):
        self.aborts_after -= 1
        if self.aborts_after < 0:
            raise Aborted("enough")


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"))
    section.runtime_dir.chmod(0o700)
    with broker(section):
        yield section


@pytest.fixture
def trainer(section):
    """Two device slabs at snapshot 0; `write(snapshot)` is an update."""
    with connect(section, "trainer-0", "trainer") as session:
        for slab in session.list_slabs():
            session.delete(slab.name)
        slabs = [actor_slab(RUN, shard.source) for shard in SHARDS]
        for slab in slabs:
            session.create(slab, object_class="actor_snapshot", device=slab.rpartition("/")[2], size_bytes=SIZE, run=RUN)
        fill(session, 0, None)
        session.register_snapshot(RUN, slabs, 0)
        yield session


def content(snapshot, index):
    return bytes([snapshot, index]) * (SIZE // 2)


def fill(session, snapshot, epoch):
    for index, shard in enumerate(SHARDS):
        with session.lease(actor_slab(RUN, shard.source), LeaseMode.WRITE, update_epoch=epoch) as lease:
            os.pwrite(lease.fd, content(snapshot, index), 0)


def update(session, snapshot):
    epoch = session.begin_update(RUN, snapshot - 1, [session.process])
    fill(session, snapshot, epoch)
    session.publish_snapshot(RUN, epoch, snapshot)


@pytest.fixture
def rollout(section):
    with connect(section, "rollout-0", "rollout") as session:
        yield session


def held(session, snapshot):
    found = []
    for shard in SHARDS:
        with session.lease(actor_slab(RUN, shard.target), LeaseMode.READ, snapshot=snapshot) as lease:
            found.append(Path(f"/proc/self/fd/{lease.fd}").read_bytes())
    return found


def opened(session):
    copies = SnapshotCopies(session, SHARDS)
    copies.open(RUN)
    return copies


def test_a_copy_follows_the_updates(trainer, rollout, monkeypatch):
    monkeypatch.setattr(copies_module, "PIECE_BYTES", 4096)
    copies = opened(rollout)
    assert copies.bring(Context(), 0) == 2 * SIZE
    assert held(rollout, 0) == [content(0, 0), content(0, 1)]
    assert copies.bring(Context(), 0) == 0
    for snapshot in (1, 2):
        update(trainer, snapshot)
        with pytest.raises(WrongState):
            held(rollout, snapshot)
        assert copies.bring(Context(), snapshot) == 2 * SIZE
        assert held(rollout, snapshot) == [content(snapshot, 0), content(snapshot, 1)]
    rows = [row for row in rollout.ledger().rows if row.object_class == "actor_snapshot"]
    assert [(row.device, row.role, row.slab_count) for row in rows] == [
        ("host:4", "rollout", 1), ("host:5", "rollout", 1), ("host:0", "trainer", 1), ("host:2", "trainer", 1)]
    assert rollout.enter_phase(RUN, 0, Phase.OVERLAP) == ()
    update(trainer, 3)  # no lease on the trainer's slabs is left


def test_a_copy_beside_the_trainers_slabs(trainer, rollout):
    """Ablation `no_weight_sharing`."""
    copies = SnapshotCopies(rollout, [ShardCopy(shard.source, shard.source) for shard in SHARDS])
    place = copies.open(RUN)
    assert not copies.elsewhere and place != RUN
    assert copies.bring(Context(), 0) == 2 * SIZE
    update(trainer, 1)
    assert copies.bring(Context(), 1) == 2 * SIZE
    for index, shard in enumerate(SHARDS):
        with rollout.lease(actor_slab(place, shard.source), LeaseMode.READ, snapshot=1) as lease:
            assert Path(f"/proc/self/fd/{lease.fd}").read_bytes() == content(1, index)
    counts = {row.role: row.size_bytes for row in rollout.ledger().rows if row.device == "host:0"}
    assert counts == {"trainer": SIZE, "rollout": SIZE}
    assert copies.open("next", wanted=False) == "next"
    assert {slab.role for slab in rollout.list_slabs()} == {"trainer"}, "a run that shares leaves no copy behind"


def test_a_copy_that_broke_off_is_torn_and_made_again(trainer, rollout):
    copies = opened(rollout)
    copies.bring(Context(), 0)
    update(trainer, 1)
    broken = Context()
    broken.aborts_after = 1
    with pytest.raises(Aborted):
        copies.bring(broken, 1)
    for snapshot in (0, 1):
        with pytest.raises(WrongState) as refused:
            held(rollout, snapshot)
        assert refused.value.reason == "SNAPSHOT_TORN"
    assert opened(rollout).bring(Context(), 1) == 2 * SIZE  # a successor
    assert held(rollout, 1) == [content(1, 0), content(1, 1)]


def test_a_first_copy_that_broke_off_is_made_again(trainer, rollout):
    broken = Context()
    broken.aborts_after = 1
    with pytest.raises(Aborted):
        opened(rollout).bring(broken, 0)
    with pytest.raises(WrongState):
        held(rollout, 0)
    opened(rollout).bring(Context(), 0)
    assert held(rollout, 0) == [content(0, 0), content(0, 1)]


def test_a_successor_finds_a_whole_copy(trainer, rollout):
    opened(rollout).bring(Context(), 0)
    assert opened(rollout).bring(Context(), 0) == 0


def test_a_copy_that_missed_updates_is_made_from_nothing(trainer, rollout):
    copies = opened(rollout)
    copies.bring(Context(), 0)
    update(trainer, 1)
    update(trainer, 2)
    assert copies.bring(Context(), 2) == 2 * SIZE
    assert held(rollout, 2) == [content(2, 0), content(2, 1)]


def test_a_snapshot_that_is_not_there_is_refused(trainer, rollout):
    copies = opened(rollout)
    copies.bring(Context(), 0)
    with pytest.raises(WrongState):
        copies.bring(Context(), 5)


def test_another_run_takes_the_devices(trainer, rollout):
    opened(rollout).bring(Context(), 0)
    SnapshotCopies(rollout, SHARDS).open("next")
    names = [slab.name for slab in rollout.list_slabs()]
    assert [name for name in names if name.endswith(("host:4", "host:5"))] == []
    assert len(names) == 2


def test_a_reader_of_the_copy_keeps_it_from_being_overwritten(section, trainer, rollout):
    copies = opened(rollout)
    copies.bring(Context(), 0)
    update(trainer, 1)
    with connect(section, "rollout-0-1", "rollout") as worker:
        with (worker.lease(actor_slab(RUN, "host:4"), LeaseMode.READ, snapshot=0),
              pytest.raises(Aborted, match="rollout-0-1")):
            copies.bring(Context(), 1)
        assert copies.bring(Context(), 1) == 2 * SIZE


def test_no_run_has_a_copys_name():
    assert copy_name("run", "rollout-0") == "run@rollout-0"
