"""The broker's engine without sockets: processes are stood in for by their pidfds."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from rollplex.broker.engine import Custody
from rollplex.broker.records import NoVault
from rollplex.broker.sessions import NoConnection
from rollplex.core.errors import (
    Aborted,
    AlreadyExists,
    BadInput,
    Forbidden,
    NotFound,
    OutOfMemory,
    RollplexError,
    Unavailable,
    WrongState,
)
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.work import ResidencyEntry
from rollplex.memory.host_driver import sealed_memfd
from rollplex.memory.slab import Slab

READ, WRITE = LeaseMode.READ, LeaseMode.WRITE
ACTOR = "runs/r/actor/host"


class Line(NoConnection):
    """A connection that is up until `lost` says otherwise."""

    def __init__(self):
        self.lost = False

    def is_lost(self):
        return self.lost


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def custody(clock):
    made = Custody(NoVault(), host_limit_bytes=100_000, fence_timeout_s=5.0, clock=clock)
    yield made
    made.close()


@pytest.fixture
def spawn():
    """Starts processes that live until killed."""
    children = []

    def start():
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def connect(custody, process, pid=None, role="trainer"):
    pid = pid or os.getpid()
    session, resumed = custody.hello(process, role, pid, os.pidfd_open(pid), Line())
    return session, resumed


async def make(custody, session, name, object_class="optimizer_state", size=1000):
    ticket = custody.announce(session.secret, Slab(name, object_class, "", "host", size))
    return await custody.deposit(session, ticket, sealed_memfd(name, size))


async def lease(custody, session, name, mode, snapshot=None, epoch=None):
    granted, _, _ = await custody.acquire(session.secret, name, mode, snapshot, epoch)
    return granted.lease_id


async def actor(custody, session):
    await make(custody, session, ACTOR, "actor_snapshot")
    await custody.grants.register_snapshot("r", (ACTOR,), 0)


async def test_deposit_needs_the_sessions_own_ticket_and_the_announced_memfd(custody):
    one, _ = connect(custody, "trainer-0")
    two, _ = connect(custody, "rollout-0", role="rollout")
    ticket = custody.announce(one.secret, Slab("s", "gradients", "", "host", 1000))
    with pytest.raises(Forbidden):
        await custody.deposit(two, ticket, -1)
    wrong = sealed_memfd("wrong", 999)
    with pytest.raises(BadInput, match="999 bytes, 1000 were announced"):
        await custody.deposit(one, ticket, wrong)
    os.close(wrong)
    assert custody.slabs.host_bytes == 0, "a failed deposit gives the room back"
    slab = await make(custody, one, "s")
    assert (slab.role, slab.generation) == ("trainer", 1)
    with pytest.raises(AlreadyExists):
        custody.announce(two.secret, Slab("s", "gradients", "", "host", 1))


@pytest.mark.parametrize(("slab", "reason"), [
    (Slab("", "media", "", "host", 1), "BAD_SLAB_NAME"), (Slab("a//b", "media", "", "host", 1), "BAD_SLAB_NAME"),
    (Slab("a\n", "media", "", "host", 1), "BAD_SLAB_NAME"), (Slab("a" * 256, "media", "", "host", 1), "BAD_SLAB_NAME"),
    (Slab("a", "medium", "", "host", 1), "BAD_OBJECT_CLASS"), (Slab("a", "media", "", "tpu:0", 1), "NO_DRIVER"),
    (Slab("a", "media", "", "host", 0), "BAD_SLAB_SIZE"), (Slab("a", "media", "", "host", -5), "BAD_SLAB_SIZE")])
async def test_bad_announcements(custody, slab, reason):
    session, _ = connect(custody, "trainer-0")
    with pytest.raises(BadInput) as caught:
        custody.announce(session.secret, slab)
    assert caught.value.reason == reason


async def test_the_host_limit_counts_announcements_and_shows_the_table(custody, clock):
    session, _ = connect(custody, "trainer-0")
    await make(custody, session, "a", size=60_000)
    custody.announce(session.secret, Slab("b", "gradients", "", "host", 40_000))
    with pytest.raises(OutOfMemory, match="100,000 of 100,000 host bytes") as caught:
        custody.announce(session.secret, Slab("c", "gradients", "", "host", 1))
    assert "optimizer_state" in str(caught.value)
    clock.now_s = 31.0
    custody.announce(session.secret, Slab("c", "gradients", "", "host", 40_000))
    assert await custody.delete(session.secret, "a") == 60_000
    assert custody.slabs.host_bytes == 40_000
    custody.disconnect(session, orderly=True)
    assert custody.slabs.host_bytes == 0, "announcements end with the session"


class SlowVault(NoVault):
    """A keeper that lets go of a slab when `let_go` is set."""

    def __init__(self):
        self.let_go = asyncio.Event()

    async def forget(self, name):
        await self.let_go.wait()


async def test_a_deleted_slab_counts_until_its_pages_are_free():
    vault = SlowVault()
    custody = Custody(vault, host_limit_bytes=100_000)
    session, _ = connect(custody, "trainer-0")
    await make(custody, session, "a", size=60_000)
    first = asyncio.create_task(custody.delete(session.secret, "a"))
    await asyncio.sleep(0)
    assert custody.list_slabs("") == [], "nobody leases it any more"
    again = asyncio.create_task(custody.delete(session.secret, "a"))
    await asyncio.sleep(0.05)
    assert not (first.done() or again.done())
    with pytest.raises(OutOfMemory):
        custody.announce(session.secret, Slab("b", "gradients", "", "host", 60_000))
    first.cancel()
    vault.let_go.set()
    assert await again == 60_000, "it goes on without whoever asked first"
    assert custody.slabs.host_bytes == 0
    await make(custody, session, "a", size=60_000)
    with pytest.raises(NotFound):
        await custody.delete(session.secret, "b")
    custody.close()


async def test_a_slab_that_is_made_again_while_the_first_leaves_is_another():
    vault = SlowVault()
    custody = Custody(vault, host_limit_bytes=0)
    session, _ = connect(custody, "trainer-0")
    await make(custody, session, "a", size=60_000)
    first = asyncio.create_task(custody.delete(session.secret, "a"))
    await asyncio.sleep(0)
    await make(custody, session, "a", size=20_000)
    assert custody.slabs.host_bytes == 80_000
    second, again = (asyncio.create_task(custody.delete(session.secret, "a")) for _ in range(2))
    await asyncio.sleep(0)
    custody.disconnect(session, orderly=False)
    await asyncio.sleep(0.05)
    vault.let_go.set()
    assert [await first, await second, await again] == [60_000, 20_000, 20_000], "its session need not last so long"
    assert custody.slabs.host_bytes == 0 and not custody.slabs.by_name
    custody.close()


async def test_descriptors_are_read_only_for_readers(custody):
    session, _ = connect(custody, "trainer-0")
    await make(custody, session, "s")
    for mode, flag in ((READ, os.O_RDONLY), (WRITE, os.O_RDWR)):
        _, ticket, _ = await custody.acquire(session.secret, "s", mode, None, None)
        _, _, fd = custody.redeem(session, ticket)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == flag
        os.close(fd)


async def test_a_released_lease_is_not_redeemed(custody):
    session, _ = connect(custody, "trainer-0")
    await make(custody, session, "s")
    granted, ticket, _ = await custody.acquire(session.secret, "s", READ, None, None)
    custody.release(session.secret, granted.lease_id)
    custody.release(session.secret, granted.lease_id)
    with pytest.raises(NotFound, match="released before"):
        custody.redeem(session, ticket)


async def test_a_lease_that_nobody_redeemed_ends_with_its_ticket(custody, clock):
    session, _ = connect(custody, "trainer-0")
    other, _ = connect(custody, "trainer-1")
    await make(custody, session, "s")
    _, redeemed, _ = await custody.acquire(session.secret, "s", READ, None, None)
    os.close(custody.redeem(session, redeemed)[2])
    granted, late, _ = await custody.acquire(session.secret, "s", WRITE, None, None)
    clock.now_s = 31.0
    with pytest.raises(Forbidden, match="expired"):
        custody.redeem(session, late)
    await lease(custody, other, "s", READ)
    assert granted.lease_id not in custody.leases.by_id
    assert len(custody.leases.on_slab("s")) == 2, "the one that was redeemed stays"


async def test_an_announcement_whose_ticket_came_late_is_taken_back(custody, clock):
    session, _ = connect(custody, "trainer-0")
    slab = Slab("s", "gradients", "", "host", 1000)
    late = custody.announce(session.secret, slab)
    clock.now_s = 31.0
    with pytest.raises(Forbidden, match="expired"):
        await custody.deposit(session, late, -1)
    custody.announce(session.secret, slab)
    assert custody.slabs.host_bytes == 1000


async def test_actor_rules(custody):
    trainer, _ = connect(custody, "trainer-0")
    rollout, _ = connect(custody, "rollout-0", role="rollout")
    await make(custody, trainer, ACTOR, "actor_snapshot")
    with pytest.raises(WrongState, match="no registered snapshot"):
        await lease(custody, rollout, ACTOR, READ, snapshot=0)
    filling = await lease(custody, trainer, ACTOR, WRITE)
    with pytest.raises(Aborted, match=r"waits for trainer-0 \(write\)"):
        await custody.grants.register_snapshot("r", (ACTOR,), 0)
    custody.release(trainer.secret, filling)
    with pytest.raises(NotFound):
        await custody.grants.register_snapshot("r", ("unknown",), 0)
    await custody.grants.register_snapshot("r", (ACTOR,), 0)
    await custody.grants.register_snapshot("r", (ACTOR,), 0)
    reading = await lease(custody, rollout, ACTOR, READ, snapshot=0)
    await lease(custody, trainer, ACTOR, READ, snapshot=0)
    with pytest.raises(Aborted, match=r"still leased by rollout-0 \(read\)") as caught:
        await custody.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    assert caught.value.reason == "READERS_REMAIN"
    assert custody.get_snapshot("r").state == "valid"
    custody.release(rollout.secret, reading)
    with pytest.raises(BadInput):
        await custody.grants.begin_update("r", 0, frozenset())
    epoch = await custody.grants.begin_update("r", 0, frozenset({"trainer-0", "trainer-1"}))
    assert custody.get_snapshot("r").update_epoch == epoch == 1
    other, _ = connect(custody, "trainer-1")
    writes = [(trainer, await lease(custody, trainer, ACTOR, WRITE, epoch=epoch)),
              (other, await lease(custody, other, ACTOR, WRITE, epoch=epoch))]
    with pytest.raises(WrongState):
        await lease(custody, rollout, ACTOR, READ, snapshot=0)
    with pytest.raises(Forbidden):
        await lease(custody, rollout, ACTOR, WRITE, epoch=epoch)
    for session, lease_id in writes:
        with pytest.raises(Aborted, match=r"publishing snapshot 1 waits for"):
            await custody.grants.publish_snapshot("r", epoch, 1)
        custody.release(session.secret, lease_id)
    await custody.grants.publish_snapshot("r", epoch, 1)
    await custody.grants.publish_snapshot("r", epoch, 1)
    await lease(custody, rollout, ACTOR, READ, snapshot=1)
    assert custody.get_snapshot("r").update_epoch == 0
    with pytest.raises(WrongState, match="leased by rollout-0#2"):
        await custody.delete(trainer.secret, ACTOR)


@pytest.mark.parametrize("state", ["sleeping", "stopped"])
async def test_a_vanished_reader_is_fenced_before_the_update(custody, spawn, state):
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    child = spawn()
    rollout, _ = connect(custody, "rollout-0", child.pid, "rollout")
    await lease(custody, rollout, ACTOR, READ, snapshot=0)
    if state == "stopped":
        child.send_signal(signal.SIGSTOP)
    custody.disconnect(rollout, orderly=False)
    assert custody.leases.by_id == {}
    assert child.poll() is None
    assert await custody.grants.begin_update("r", 0, frozenset({"trainer-0"})) == 1
    assert child.wait(5) == -signal.SIGKILL
    assert custody.sessions.former == []


async def test_a_goodbye_or_a_release_needs_no_fence(custody, spawn):
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    polite, tidy = spawn(), spawn()
    session, _ = connect(custody, "rollout-0", polite.pid, "rollout")
    await lease(custody, session, ACTOR, READ, snapshot=0)
    custody.disconnect(session, orderly=True)
    session, _ = connect(custody, "rollout-1", tidy.pid, "rollout")
    custody.release(session.secret, await lease(custody, session, ACTOR, READ, snapshot=0))
    custody.disconnect(session, orderly=False)
    await custody.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    assert polite.poll() is None
    assert tidy.poll() is None


async def test_a_dead_process_needs_no_kill(custody, spawn):
    trainer, _ = connect(custody, "trainer-0")
    await make(custody, trainer, "state")
    child = spawn()
    old, _ = connect(custody, "trainer-1", child.pid)
    await lease(custody, old, "state", WRITE)
    child.kill()
    child.wait()
    custody.disconnect(old, orderly=False)
    assert custody.sessions.former == []
    await lease(custody, trainer, "state", WRITE)


async def test_the_same_process_takes_up_its_leases(custody, spawn):
    child = spawn()
    session, _ = connect(custody, "trainer-0", child.pid)
    await make(custody, session, "state")
    held = await lease(custody, session, "state", WRITE)
    custody.disconnect(session, orderly=False)
    again, resumed = connect(custody, "trainer-0", child.pid)
    assert resumed == [held]
    assert custody.leases.by_id[held].session == again.name
    custody.release(again.secret, held)
    assert child.poll() is None


async def test_a_connected_process_is_named_not_killed(custody, spawn):
    child = spawn()
    trainer, _ = connect(custody, "trainer-0")
    await make(custody, trainer, "state")
    first, _ = connect(custody, "rollout-0", child.pid, "rollout")
    held = await lease(custody, first, "state", READ)
    custody.disconnect(first, orderly=False)
    second, _ = connect(custody, "rollout-0b", child.pid, "rollout")
    with pytest.raises(Aborted, match="rollout-0 .*lost a connection"):
        await lease(custody, trainer, "state", WRITE)
    assert child.poll() is None
    custody.release(second.secret, held)
    await lease(custody, trainer, "state", WRITE)


async def test_one_live_process_a_name(custody, spawn):
    child = spawn()
    old, _ = connect(custody, "trainer-0", child.pid)
    await make(custody, old, "state")
    await lease(custody, old, "state", WRITE)
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(Aborted, match=f"connected already, as pid {child.pid}"):
        custody.hello("trainer-0", "trainer", os.getpid(), pidfd, Line())
    os.close(pidfd)
    child.kill()
    child.wait()
    new, resumed = connect(custody, "trainer-0")
    assert resumed == []
    with pytest.raises(NotFound) as caught:
        custody.sessions.get(old.secret)
    assert caught.value.reason == "SESSION_NOT_FOUND"
    await lease(custody, new, "state", WRITE)


async def test_a_lost_connection_makes_room_even_before_its_end_is_read(custody):
    old, _ = connect(custody, "trainer-0")
    await make(custody, old, "state")
    held = await lease(custody, old, "state", WRITE)
    with pytest.raises(Aborted):
        connect(custody, "trainer-0")
    old.connection.lost = True
    new, resumed = connect(custody, "trainer-0")
    assert resumed == [held]
    custody.disconnect(old, orderly=False)
    assert custody.leases.by_id[held].session == new.name


@pytest.mark.parametrize(("residency", "size"), [("unspecified", 1), ("", 1), ("hbm", -1)])
async def test_reports_are_checked(custody, residency, size):
    session, _ = connect(custody, "trainer-0")
    with pytest.raises(BadInput):
        custody.report(session.secret, (ResidencyEntry("gradients", "trainer", "host", residency, size),))


async def test_records_of_another_version_are_left_out(custody, clock):
    assert "novelty/x" in custody.restore([("novelty/x", {}, None), *custody.records()])


@pytest.mark.parametrize(("process", "role"), [("", "trainer"), ("Trainer", "trainer"), ("a#1", "trainer"),
                                               (None, "trainer"), ("trainer-0", 5), ("a" * 64, "trainer")])
async def test_bad_names(custody, process, role):
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(BadInput):
        custody.hello(process, role, os.getpid(), pidfd, Line())
    os.close(pidfd)


async def test_rolling_forward_takes_the_next_epoch_and_fences_the_dead_writer(custody, spawn):
    child = spawn()
    trainer, _ = connect(custody, "trainer-0", child.pid)
    await actor(custody, trainer)
    epoch = await custody.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    await lease(custody, trainer, ACTOR, WRITE, epoch=epoch)
    child.send_signal(signal.SIGSTOP)
    custody.disconnect(trainer, orderly=False)
    assert await custody.grants.begin_update("r", 0, frozenset({"trainer-0"})) == 2
    assert child.wait(5) == -signal.SIGKILL
    successor, _ = connect(custody, "trainer-0")
    with pytest.raises(WrongState):
        await lease(custody, successor, ACTOR, WRITE, epoch=1)
    await lease(custody, successor, ACTOR, WRITE, epoch=2)


async def test_nothing_is_granted_while_a_process_dies(custody, spawn):
    """A READ asked for during the fencing of BeginUpdate is answered after it, and refused."""
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    child = spawn()
    gone, _ = connect(custody, "rollout-0", child.pid, "rollout")
    await lease(custody, gone, ACTOR, READ, snapshot=0)
    custody.disconnect(gone, orderly=False)
    other, _ = connect(custody, "reference-0", role="reference")
    begin = asyncio.create_task(custody.grants.begin_update("r", 0, frozenset({"trainer-0"})))
    await asyncio.sleep(0)
    with pytest.raises(WrongState, match="being replaced"):
        await lease(custody, other, ACTOR, READ, snapshot=0)
    assert await begin == 1


async def successor_of(custody, clock, grace_s=10.0):
    """A second custody from the first one's records, as through the keeper."""
    kept = [(name, metadata, None if fd is None else os.dup(fd)) for name, metadata, fd in custody.records()]
    made = Custody(NoVault(), host_limit_bytes=0, reconnect_grace_s=grace_s, clock=clock)
    return made, made.restore(kept), kept


async def test_a_successor_knows_slabs_leases_snapshots_and_phase(custody, clock, spawn):
    child = spawn()
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    rollout, _ = connect(custody, "rollout-0", child.pid, "rollout")
    held = await lease(custody, rollout, ACTOR, READ, snapshot=0)
    custody.enter_phase("r", 3, Phase.SUFFIX)
    made, refused, _ = await successor_of(custody, clock)
    assert refused == {}
    assert made.list_slabs("") == custody.list_slabs("")
    assert made.get_snapshot("r") == custody.get_snapshot("r")
    assert (made.ledger.run, made.ledger.iteration, made.ledger.phase) == ("r", 3, Phase.SUFFIX)
    assert made.ledger.rows() == custody.ledger.rows()
    with pytest.raises(Unavailable, match="rollout-0") as caught:
        await made.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    assert caught.value.reason == "RECONNECT_GRACE"
    again, resumed = connect(made, "rollout-0", child.pid, "rollout")
    assert resumed == [held]
    assert again.name == "rollout-0#3"
    with pytest.raises(Aborted):
        await made.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    custody.disconnect(rollout, orderly=True)
    made.close()


async def test_after_the_grace_the_inherited_are_fenced(custody, clock, spawn):
    child = spawn()
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    rollout, _ = connect(custody, "rollout-0", child.pid, "rollout")
    await lease(custody, rollout, ACTOR, READ, snapshot=0)
    made, _, _ = await successor_of(custody, clock)
    clock.now_s = 10.1
    await made.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    assert child.wait(5) == -signal.SIGKILL
    made.close()


async def test_a_phase_that_was_declared_before_another_changes_nothing_when_it_comes_after_it(custody):
    for number, phase in enumerate((Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE), 1):
        custody.enter_phase("r", 0, phase, order=("coordinator", number))
    assert custody.enter_phase("r", 0, Phase.SUFFIX, order=("coordinator", 2)) == ()
    assert custody.ledger.phase is Phase.UPDATE
    custody.enter_phase("r", 0, Phase.UPDATE, order=("coordinator", 3))
    assert custody.ledger.phase is Phase.UPDATE
    custody.enter_phase("r", 0, Phase.OVERLAP, order=("its successor", 1))
    assert custody.ledger.phase is Phase.OVERLAP


async def test_a_torn_snapshot_survives_a_restart(custody, clock):
    trainer, _ = connect(custody, "trainer-0")
    await actor(custody, trainer)
    epoch = await custody.grants.begin_update("r", 0, frozenset({"trainer-0"}))
    await lease(custody, trainer, ACTOR, WRITE, epoch=epoch)
    made, _, _ = await successor_of(custody, clock)
    assert made.get_snapshot("r") == custody.get_snapshot("r")
    again, resumed = connect(made, "trainer-0")
    assert len(resumed) == 1
    await lease(made, again, ACTOR, WRITE, epoch=epoch)
    assert await made.grants.begin_update("r", 0, frozenset({"trainer-0"})) == epoch + 1
    made.close()


async def test_what_the_keeper_gives_back_is_checked(custody, clock):
    trainer, _ = connect(custody, "trainer-0")
    for name in "abcd":
        await make(custody, trainer, name)
    held = await lease(custody, trainer, "a", READ)
    records = {name: [metadata, None if fd is None else os.dup(fd)] for name, metadata, fd in custody.records()}
    records["slab/a"][1] = sealed_memfd("other", 1000)
    records["slab/b"][0]["size_bytes"] = 999
    records["slab/c"][0]["generation"] = 0
    made = Custody(NoVault(), host_limit_bytes=0, clock=clock)
    refused = made.restore([(name, *rest) for name, rest in records.items()])
    assert set(refused) == {"slab/a", "slab/b", "slab/c", f"lease/{held}"}
    assert "inode" in refused["slab/a"]
    assert [slab.name for slab in made.list_slabs("")] == ["d"]
    made.close()


async def test_an_unknown_session_gets_nothing(custody):
    for call in (lambda: custody.announce("x", Slab("s", "media", "", "host", 1)),
                 lambda: custody.release("x", "l"), lambda: custody.report("x", ())):
        with pytest.raises(RollplexError) as caught:
            call()
        assert caught.value.reason == "SESSION_NOT_FOUND"
    with pytest.raises(RollplexError, match="session"):
        await custody.delete("x", "s")
