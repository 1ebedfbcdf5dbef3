"""Every state x event of a snapshot, and who is admitted to its slabs."""

from __future__ import annotations

import itertools

import pytest

from rollplex.broker.actors import Actor, ActorTable
from rollplex.core.errors import AlreadyExists, BadInput, Forbidden, NotFound, RollplexError, WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.snapshots import Snapshot, SnapshotState

VALID, TORN = Snapshot(5, SnapshotState.VALID, 3), Snapshot(5, SnapshotState.TORN, 3)
READ, WRITE = LeaseMode.READ, LeaseMode.WRITE

BEGIN = {
    (VALID, 5, 4): Snapshot(5, SnapshotState.TORN, 4),
    (VALID, 5, 9): Snapshot(5, SnapshotState.TORN, 9),
    (TORN, 5, 4): Snapshot(5, SnapshotState.TORN, 4),
    (TORN, 5, 9): Snapshot(5, SnapshotState.TORN, 9),
}
PUBLISH = {(TORN, 6, 3): Snapshot(6, SnapshotState.VALID, 3)}


@pytest.mark.parametrize(("state", "number", "epoch"), list(itertools.product([VALID, TORN], [4, 5, 6], [2, 3, 4, 9])))
def test_begin_update(state, number, epoch):
    expected = BEGIN.get((state, number, epoch))
    if expected is None:
        with pytest.raises(WrongState):
            state.begin_update(number, epoch)
    else:
        assert state.begin_update(number, epoch) == expected


@pytest.mark.parametrize(("state", "number", "epoch"), list(itertools.product([VALID, TORN], [5, 6, 7], [2, 3, 4])))
def test_publish(state, number, epoch):
    expected = PUBLISH.get((state, number, epoch))
    if expected is None:
        with pytest.raises(WrongState):
            state.publish(number, epoch)
    else:
        assert state.publish(number, epoch) == expected


ADMISSION = [
    (VALID, READ, "rollout-0", 5, None, None),
    (VALID, READ, "rollout-0", 4, None, "STALE_SNAPSHOT"),
    (VALID, READ, "rollout-0", 6, None, "STALE_SNAPSHOT"),
    (VALID, READ, "rollout-0", None, None, "SNAPSHOT_REQUIRED"),
    (VALID, WRITE, "trainer-0", None, 3, "NO_UPDATE_OPEN"),
    (VALID, WRITE, "trainer-0", None, None, "NO_UPDATE_OPEN"),
    (TORN, READ, "rollout-0", 5, None, "SNAPSHOT_TORN"),
    (TORN, READ, "trainer-0", 5, None, "SNAPSHOT_TORN"),
    (TORN, READ, "rollout-0", None, None, "SNAPSHOT_REQUIRED"),
    (TORN, WRITE, "trainer-0", None, 3, None),
    (TORN, WRITE, "trainer-0", None, 2, "STALE_EPOCH"),
    (TORN, WRITE, "trainer-0", None, 4, "STALE_EPOCH"),
    (TORN, WRITE, "trainer-0", None, None, "STALE_EPOCH"),
    (TORN, WRITE, "rollout-0", None, 3, "NOT_A_WRITER"),
]


@pytest.mark.parametrize(("state", "mode", "process", "snapshot", "epoch", "reason"), ADMISSION)
def test_admission(state, mode, process, snapshot, epoch, reason):
    actor = Actor("run", ("a",), state, frozenset({"trainer-0"}) if state is TORN else frozenset())
    if reason is None:
        actor.admit(mode, process, snapshot, epoch)
        return
    with pytest.raises(RollplexError) as caught:
        actor.admit(mode, process, snapshot, epoch)
    assert caught.value.reason == reason
    assert isinstance(caught.value, WrongState | BadInput | Forbidden)


@pytest.fixture
def table():
    actors = ActorTable()
    actors.register("run", ("a", "b"), 0)
    return actors


def test_registration_is_idempotent_and_exclusive(table):
    table.register("run", ("a", "b"), 0)
    with pytest.raises(AlreadyExists):
        table.register("run", ("a", "b"), 1)
    with pytest.raises(AlreadyExists):
        table.register("run", ("a",), 0)
    with pytest.raises(AlreadyExists, match="run run's actor"):
        table.register("other", ("b",), 0)
    table.begin_update("run", 0, frozenset({"t"}))
    with pytest.raises(WrongState):
        table.register("run", ("a", "b"), 0)
    for run, slabs, number in (("", ("c",), 0), ("x", (), 0), ("x", ("c",), -1)):
        with pytest.raises(BadInput):
            table.register(run, slabs, number)


def test_an_update_and_the_next(table):
    assert table.begin_update("run", 0, frozenset({"t"})).snapshot.update_epoch == 1
    assert table.begin_update("run", 0, frozenset({"t", "u"})).snapshot.update_epoch == 2
    with pytest.raises(WrongState):
        table.publish("run", 1, 1)
    published = table.publish("run", 1, 2)
    assert (published.snapshot.number, published.writers) == (1, frozenset())
    assert table.published("run", 1, 2)
    assert not table.published("run", 1, 1)
    assert table.begin_update("run", 1, frozenset({"t"})).snapshot.update_epoch == 3


def test_only_a_writers_read_lease_is_tolerated(table):
    actor = table.begin_update("run", 0, frozenset({"t"}))
    assert actor.tolerates("t", READ)
    assert not actor.tolerates("t", WRITE)
    assert not actor.tolerates("r", READ)


def test_a_deleted_slab_ends_the_snapshot(table):
    table.forget_slab("unknown")
    table.forget_slab("b")
    with pytest.raises(NotFound):
        table.get("run")
    assert table.of_slab("a") is None
