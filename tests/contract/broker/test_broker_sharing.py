from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rollplex.core.errors import Aborted, AlreadyExists, BadInput, NotFound, OutOfMemory, Unavailable, WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.placement import Placement
from rollplex.core.work import ResidencyEntry
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.host_driver import sealed_memfd
from rollplex.memory.mapping import MappedSlab
from rollplex.memory.pinned_pool import PinnedPool

READ, WRITE = LeaseMode.READ, LeaseMode.WRITE
ACTOR = "runs/r/actor/host"


def bound(session, name, mode, **options):
    lease = session.lease(name, mode, **options)
    mapped = MappedSlab(driver_of("host"), lease.slab.size_bytes)
    mapped.bind(lease, writable=mode is WRITE)
    return lease, mapped, mapped.tensor(Placement.contiguous(name, 0, (lease.slab.size_bytes,), "uint8"))


def test_two_processes_share_bytes(mesh):
    trainer, reader = mesh.session(), mesh.holder()
    slab = trainer.create("media/0", object_class="optimizer_state", size_bytes=5000)
    lease, mapped, tensor = bound(trainer, "media/0", WRITE)
    tensor.fill_(5)
    assert lease.slab == slab
    assert mapped.inode == slab.inode == os.fstat(lease.fd).st_ino
    mapped.unbind()
    lease.release()
    reader.ask("hold('media/0', 'read')")
    assert reader.ask("int(held['media/0'][2].sum())") == 25000
    assert reader.ask("held['media/0'][1].inode") == slab.inode
    second, mapped_again, view = bound(trainer, "media/0", READ)
    assert int(view.sum()) == 25000
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(second.fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(second.fd, 1)
    with pytest.raises(Aborted, match=r"rollout-0 \(read\)"):
        trainer.lease("media/0", WRITE)
    reader.ask("held['media/0'][0].release()")
    mapped_again.unbind()
    second.release()
    trainer.lease("media/0", WRITE).release()
    assert trainer.delete("media/0") == 5000
    with pytest.raises(NotFound):
        trainer.lease("media/0", READ)


def test_one_tensor_over_many_bindings(mesh):
    session = mesh.session()
    for name in ("a", "b"):
        session.create(name, object_class="optimizer_state", size_bytes=4096)
    mapped = MappedSlab(driver_of("host"), 4096)
    tensor = mapped.tensor(Placement.contiguous("a", 128, (100,), "float32"))
    address = tensor.data_ptr()
    for name, value in (("a", 1.0), ("b", 2.0)):
        with session.lease(name, WRITE) as lease:
            mapped.bind(lease, writable=True)
            tensor.fill_(value)
            mapped.unbind()
    for name, value in (("a", 1.0), ("b", 2.0)):
        lease = session.lease(name, READ)
        mapped.bind(lease)
        assert (tensor.data_ptr(), float(tensor.mean())) == (address, value)
        with pytest.raises(WrongState, match="reading only"):
            mapped.bind(lease, writable=True)
    assert mapped.address == address - 128
    mapped.unbind()
    assert (mapped.inode, mapped.bound) == (0, False)


def test_memory_made_elsewhere_is_deposited(mesh):
    session = mesh.session("coordinator", "coordinator")
    fd = sealed_memfd("decoded", 300)
    os.pwrite(fd, bytes(range(100)), 0)
    slab = session.deposit("runs/r/media/0/1", fd, object_class="media", run="r")
    os.close(fd)
    assert (slab.size_bytes, slab.run, slab.role) == (300, "r", "coordinator")
    with session.lease("runs/r/media/0/1", READ) as lease:
        assert os.pread(lease.fd, 100, 0) == bytes(range(100))
    assert session.list_slabs("runs/r/media/") == (slab,)
    assert session.list_slabs("runs/other") == ()
    with pytest.raises(AlreadyExists):
        session.create("runs/r/media/0/1", object_class="media", size_bytes=300)


def test_unsealed_memory_is_refused_and_leaves_nothing(mesh):
    session = mesh.session()
    fd = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(fd, 100)
    with pytest.raises(BadInput, match="not sealed"):
        session.deposit("loose", fd, object_class="media")
    os.close(fd)
    assert session.list_slabs() == ()
    assert session.ledger().host_slab_bytes == 0
    session.create("loose", object_class="optimizer_state", size_bytes=1)


def test_the_broker_never_maps_a_slab(mesh):
    session = mesh.session()
    session.create("s", object_class="optimizer_state", size_bytes=1 << 20)
    lease, mapped, tensor = bound(session, "s", WRITE)
    tensor.fill_(1)
    for pid in (mesh.broker.pid, mesh.keeper.pid):
        links = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.append(str(path.readlink()))
        assert any("memfd:rollplex:s" in link for link in links)
        assert "memfd" not in Path(f"/proc/{pid}/maps").read_text()
    assert "memfd:rollplex:s" in Path("/proc/self/maps").read_text()
    mapped.close()
    lease.release()


def test_a_killed_holders_lease_ends_with_its_connection(mesh):
    session, reader = mesh.session(), mesh.holder()
    session.create("s", object_class="optimizer_state", size_bytes=100)
    reader.ask("hold('s', 'read')")
    with pytest.raises(Aborted, match="rollout-0"):
        session.lease("s", WRITE)
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait()
    deadline = time.monotonic() + 5
    while True:
        try:
            session.lease("s", WRITE).release()
            break
        except Aborted:
            # The kernel closes the socket before the exit is complete; the broker reads its end a moment later.
            assert time.monotonic() < deadline
    assert session.delete("s") == 100


def test_a_stopped_reader_that_lost_its_connection_is_killed_before_the_update(mesh):
    trainer, reader = mesh.session(), mesh.holder()
    trainer.create(ACTOR, object_class="actor_snapshot", size_bytes=100, run="r")
    trainer.register_snapshot("r", [ACTOR], 0)
    reader.ask(f"hold({ACTOR!r}, 'read', snapshot=0)")
    with pytest.raises(Aborted, match="rollout-0") as caught:
        trainer.begin_update("r", 0, ["trainer-0"])
    assert caught.value.reason == "READERS_REMAIN"
    # As good as dead: the watcher is told not to reconnect, the connection breaks, the mapping stays.
    reader.ask("[setattr(session._link, '_closed', True), session._link._connection.shut()] and None")
    time.sleep(0.2)
    reader.process.send_signal(signal.SIGSTOP)
    assert trainer.begin_update("r", 0, ["trainer-0"]) == 1
    assert reader.process.wait(5) == -signal.SIGKILL


def test_a_snapshots_life(mesh):
    trainer, coordinator, reader = mesh.session(), mesh.session("coordinator", "coordinator"), mesh.holder()
    trainer.create(ACTOR, object_class="actor_snapshot", size_bytes=100, run="r")
    with pytest.raises(NotFound):
        coordinator.get_snapshot("r")
    coordinator.register_snapshot("r", [ACTOR], 0)
    coordinator.register_snapshot("r", [ACTOR], 0)
    reader.ask(f"hold({ACTOR!r}, 'read', snapshot=0)")
    keep, mapped, tensor = bound(trainer, ACTOR, READ, snapshot=0)
    reader.ask(f"(held[{ACTOR!r}][1].unbind(), held[{ACTOR!r}][0].release()) and None")
    epoch = coordinator.begin_update("r", 0, ["trainer-0"])
    assert coordinator.get_snapshot("r").state == "torn"
    assert "being replaced" in reader.ask(f"hold({ACTOR!r}, 'read', snapshot=0)")
    with trainer.lease(ACTOR, WRITE, update_epoch=epoch) as writing:
        mapped.bind(writing, writable=True)
        tensor.fill_(8)
        with pytest.raises(Aborted, match="trainer-0"):
            coordinator.publish_snapshot("r", epoch, 1)
        mapped.unbind()
    keep.release()
    coordinator.publish_snapshot("r", epoch, 1)
    coordinator.publish_snapshot("r", epoch, 1)
    assert coordinator.get_snapshot("r").snapshot == 1
    assert "holds snapshot 1, not 0" in reader.ask(f"hold({ACTOR!r}, 'read', snapshot=0)")
    reader.ask(f"hold({ACTOR!r}, 'read', snapshot=1)")
    assert reader.ask(f"int(held[{ACTOR!r}][2].sum())") == 800


def test_the_ledger_counts_a_shared_slab_once_and_names_violations(mesh):
    trainer, rollout = mesh.session(), mesh.session("rollout-0", "rollout")
    trainer.create(ACTOR, object_class="actor_snapshot", size_bytes=4000, run="r")
    trainer.register_snapshot("r", [ACTOR], 0)
    leases = [session.lease(ACTOR, READ, snapshot=0) for session in (trainer, rollout, rollout)]
    assert trainer.enter_phase("r", 0, Phase.OVERLAP) == ()
    rollout.report_residency([ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 700, 900)])
    rows = {row.object_class: row for row in trainer.ledger("r").rows}
    assert (rows["actor_snapshot"].size_bytes, rows["actor_snapshot"].slab_count) == (4000, 1)
    assert (rows["rollout_kv"].size_bytes, rows["rollout_kv"].role) == (700, "rollout")
    wrong = "rollout_kv: 700 bytes hbm on host in phase"
    assert trainer.enter_phase("r", 0, Phase.SUFFIX) == (f"{wrong} suffix",)
    assert trainer.enter_phase("r", 0, Phase.UPDATE) == (f"{wrong} suffix", f"{wrong} update")
    peaks = {(row.phase, row.object_class): row.size_bytes for row in trainer.ledger().peaks}
    assert peaks["overlap", "rollout_kv"] == 900
    assert peaks["suffix", "rollout_kv"] == 700
    rollout.report_residency([])
    assert trainer.enter_phase("r", 0, Phase.IDLE) == ()
    for lease in leases:
        lease.release()


def test_beyond_the_limit_is_refused_with_the_table(node):
    node.options += ["broker.host_limit_bytes=10000", "broker.keeper=false"]
    node.start_broker()
    session = node.session()
    session.create("a", object_class="optimizer_state", size_bytes=9000)
    with pytest.raises(OutOfMemory, match=r"1,001 bytes for slab b .*9,000 of 10,000") as caught:
        session.create("b", object_class="gradients", size_bytes=1001)
    assert "optimizer_state      trainer" in str(caught.value)
    assert caught.value.metadata["limit_bytes"] == "10000"
    assert session.ledger().host_limit_bytes == 10000
    session.delete("a")
    session.create("b", object_class="gradients", size_bytes=10000)


def test_two_processes_of_one_name(mesh):
    reader = mesh.holder("trainer-0", "trainer")
    assert reader.ask("session.generation") == 1
    with pytest.raises(Aborted, match=f"as pid {reader.process.pid}") as caught:
        BrokerSession.connect(mesh.address, mesh.directory / "handles.sock", process="trainer-0", role="trainer",
                              timeout_s=5)
    assert caught.value.reason == "PROCESS_NAME_IN_USE"
    reader.stop()
    assert mesh.session().generation == 1


def test_without_a_broker_the_deadline_holds(node):
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no broker answers"):
        BrokerSession.connect(node.address, node.directory / "handles.sock", process="x", role="trainer", timeout_s=0.5)
    assert time.monotonic() - started < 3


def test_a_pool_in_a_slab(mesh):
    session = mesh.session()
    pool = PinnedPool.create(session, "runs/r/trainer-0/pool", 10_000, run="r")
    handle = pool.put(torch.arange(100))
    assert torch.equal(pool.get(handle), torch.arange(100))
    with pytest.raises(OutOfMemory, match="do not fit the pool"):
        pool.put(torch.zeros(2000, dtype=torch.float64))
    assert session.ledger("r").rows[0].object_class == "pinned_pool"
    pool.close()
    pool.close()
    with pytest.raises(WrongState, match="closed"):
        pool.get(handle)
    assert session.list_slabs() == ()


def test_nothing_leaks_over_many_cycles(mesh):
    session = mesh.session()
    pids = ["self", mesh.broker.pid, mesh.keeper.pid]

    def cycle(index):
        session.create(f"s/{index}", object_class="optimizer_state", size_bytes=4096)
        lease, mapped, tensor = bound(session, f"s/{index}", WRITE)
        tensor[0] = 1
        mapped.close()
        lease.release()
        session.delete(f"s/{index}")

    def counts():
        # The keeper acts on the last drop after the broker has answered us.
        time.sleep(0.3)
        maps = Path("/proc/self/maps").read_text().count("memfd:rollplex")
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids], maps

    for index in range(5):
        cycle(index)
    before = counts()
    for index in range(200):
        cycle(index)
    assert counts() == before
    assert session.list_slabs() == ()
