from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollplex.broker.keeper_link import KeeperLink
from rollplex.core.errors import Aborted, NotFound, Unavailable
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.placement import Placement
from rollplex.core.work import ResidencyEntry
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.rpc.handles import connect, recv_frame, send_frame

READ, WRITE = LeaseMode.READ, LeaseMode.WRITE
ACTOR = "runs/r/actor/host"


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def fill(session, name, value, size=1000, object_class="optimizer_state"):
    slab = session.create(name, object_class=object_class, size_bytes=size, run="r")
    with session.lease(name, WRITE) as lease:
        os.pwrite(lease.fd, bytes([value]) * size, 0)
    return slab


def content(session, name, **options):
    with session.lease(name, READ, **options) as lease:
        return os.pread(lease.fd, lease.slab.size_bytes, 0)


def descriptors(pid: int) -> list[str]:
    return [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]


def test_a_deleted_slab_is_free_when_the_answer_comes(mesh):
    session = mesh.session()
    fill(session, "gone", 1, size=1 << 20)
    processes = mesh.broker.pid, mesh.keeper.pid
    assert all(any(target.startswith("/memfd:") for target in descriptors(pid)) for pid in processes)
    assert session.delete("gone") == 1 << 20
    assert not any(target.startswith("/memfd:") for pid in processes for target in descriptors(pid))
    assert session.ledger().host_slab_bytes == 0


def test_a_killed_broker_loses_nothing(mesh):
    session = mesh.session()
    slabs = [fill(session, f"s/{index}", index) for index in range(3)]
    fill(session, ACTOR, 9, object_class="actor_snapshot")
    session.register_snapshot("r", [ACTOR], 4)
    session.enter_phase("r", 4, Phase.OVERLAP)
    session.report_residency([ResidencyEntry("boundary_trainer", "trainer", "host", "hbm", 77, 77)])
    held = session.lease("s/0", WRITE)
    mapped = MappedSlab(driver_of("host"), 1000)
    mapped.bind(held, writable=True)
    tensor = mapped.tensor(Placement.contiguous("s/0", 0, (1000,), "uint8"))
    rows = session.ledger().rows
    kill(mesh.broker)
    tensor.fill_(200)
    mesh.start_broker()
    assert session.list_slabs("s/") == tuple(slabs)
    assert session.generation == 2
    assert not held.lost
    assert content(session, "s/0") == bytes([200]) * 1000
    for index in (1, 2):
        assert content(session, f"s/{index}") == bytes([index]) * 1000
    assert content(session, ACTOR, snapshot=4) == bytes([9]) * 1000
    assert session.ledger().rows == rows
    assert session.enter_phase("r", 4, Phase.SUFFIX) == ()
    mapped.close()
    held.release()
    new = session.create("after", object_class="optimizer_state", size_bytes=1)
    assert new.generation > max(slab.generation for slab in slabs)


def test_what_a_restarted_broker_must_hear_is_said_again_until_it_has_heard(mesh, monkeypatch):
    """gRPC may find the new broker later than the handle socket does."""
    session = mesh.session()
    fill(session, "s", 1)
    session.report_residency([ResidencyEntry("boundary_trainer", "trainer", "host", "hbm", 77, 77)])
    held = session.lease("s", READ)
    session._link._leases.clear()  # as if its answer had been lost
    refusals = {"ReleaseLease": 1, "ReportResidency": 1}
    rpc = session._link.rpc

    def flaky_rpc(method, request):
        name = type(request).__name__.removesuffix("Request")
        if refusals.get(name):
            refusals[name] -= 1
            raise Unavailable("connection refused")
        return rpc(method, request)

    monkeypatch.setattr(session._link, "rpc", flaky_rpc)
    rows = session.ledger().rows
    kill(mesh.broker)
    mesh.start_broker()
    assert session.ledger().rows == rows
    assert session.generation == 2
    assert refusals == {"ReleaseLease": 0, "ReportResidency": 0}
    other = mesh.session("trainer-1")
    other.lease("s", WRITE).release()
    os.close(held.fd)


def test_leases_of_other_processes_go_on_without_a_call(mesh):
    session, reader = mesh.session(), mesh.holder()
    fill(session, "s", 1)
    reader.ask("hold('s', 'read')")
    kill(mesh.broker)
    mesh.start_broker()
    session.list_slabs()
    time.sleep(1.0)
    with pytest.raises(Aborted, match="rollout-0"):
        session.lease("s", WRITE)
    assert reader.ask("[session.generation, held['s'][0].lost, int(held['s'][2].sum())]") == [2, False, 1000]
    reader.ask("held['s'][0].release()")
    session.lease("s", WRITE).release()


def test_a_reader_that_died_with_the_broker_is_no_obstacle(mesh):
    session, reader = mesh.session(), mesh.holder()
    fill(session, ACTOR, 1, object_class="actor_snapshot")
    session.register_snapshot("r", [ACTOR], 0)
    reader.ask(f"hold({ACTOR!r}, 'read', snapshot=0)")
    kill(mesh.broker)
    kill(reader.process)
    mesh.start_broker()
    assert session.begin_update("r", 0, ["trainer-0"]) == 1


def test_a_torn_snapshot_stays_torn(mesh):
    session = mesh.session()
    fill(session, ACTOR, 1, object_class="actor_snapshot")
    session.register_snapshot("r", [ACTOR], 0)
    epoch = session.begin_update("r", 0, ["trainer-0"])
    writing = session.lease(ACTOR, WRITE, update_epoch=epoch)
    kill(mesh.broker)
    mesh.start_broker()
    info = session.get_snapshot("r")
    assert (info.state, info.snapshot, info.update_epoch, info.slabs) == ("torn", 0, epoch, (ACTOR,))
    writing.release()
    session.publish_snapshot("r", epoch, 1)
    kill(mesh.broker)
    mesh.start_broker()
    assert session.get_snapshot("r").snapshot == 1


def test_a_restarted_keeper_is_refilled(mesh):
    session = mesh.session()
    slab = fill(session, "s", 7)
    held = session.lease("s", READ)
    kill(mesh.keeper)
    mesh.start_keeper()
    session.create("made meanwhile", object_class="optimizer_state", size_bytes=10)
    kill(mesh.broker)
    mesh.start_broker()
    assert {found.name for found in session.list_slabs()} == {"s", "made meanwhile"}
    assert session.list_slabs("s") == (slab,)
    assert content(session, "s") == bytes([7]) * 1000
    assert not held.lost
    held.release()


def test_without_the_keeper_a_slab_is_not_promised(node):
    node.options[-1] = "broker.keeper_timeout_s=0.5"
    node.start_keeper()
    node.await_keeper()
    node.start_broker()
    session = node.session()
    fill(session, "s", 7)
    kill(node.keeper)
    with pytest.raises(Unavailable, match="the keeper did not take slab/late"):
        session.create("late", object_class="optimizer_state", size_bytes=10)
    assert session.ledger().host_slab_bytes == 1000
    assert content(session, "s") == bytes([7]) * 1000, "what is there goes on"
    node.start_keeper()
    node.await_keeper()
    session.create("late", object_class="optimizer_state", size_bytes=10)


def test_a_stopped_keeper_does_not_hold_up_leases(node):
    node.options[-1] = "broker.keeper_timeout_s=1"
    node.start_keeper()
    node.await_keeper()
    node.start_broker()
    session = node.session()
    fill(session, "s", 7)
    node.keeper.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(50):
        session.lease("s", READ).release()
    assert time.monotonic() - started < 2
    with pytest.raises(Unavailable, match="keeper"):
        session.create("late", object_class="optimizer_state", size_bytes=10)
    node.keeper.send_signal(signal.SIGCONT)
    session.create("later", object_class="optimizer_state", size_bytes=10)


def test_a_broker_that_is_killed_while_its_keeper_is_stopped_finds_everything_once_it_goes_on(mesh):
    session = mesh.session()
    slab = fill(session, "s", 6)
    mesh.keeper.send_signal(signal.SIGSTOP)
    kill(mesh.broker)
    mesh.start_broker()
    time.sleep(1.0)
    assert mesh.broker.poll() is None
    mesh.keeper.send_signal(signal.SIGCONT)
    assert session.list_slabs() == (slab,)
    assert content(session, "s") == bytes([6]) * 1000


def test_a_refill_that_breaks_off_loses_nothing(node):
    node.start_keeper()
    node.await_keeper()

    def asked(sock, op, *, name="", fd=None):
        send_frame(sock, {"op": op, **({"name": name, "metadata": {}} if op == "put" else {})}, fd)
        return recv_frame(sock)[0]["records"]

    def put(sock, name):
        fd = os.memfd_create(name)
        try:
            return asked(sock, "put", name=name, fd=fd)
        finally:
            os.close(fd)

    with connect(node.directory / "keeper.sock", timeout_s=5.0) as first:
        assert [put(first, name) for name in ("slab/a", "slab/b")] == [1, 2]
        assert asked(first, "refill") == 2
        assert put(first, "slab/c") == 3
    with connect(node.directory / "keeper.sock", timeout_s=5.0) as second:
        assert asked(second, "refill") == 3
        assert [put(second, name) for name in ("slab/b", "slab/d")] == [3, 4]
        assert asked(second, "refilled") == 2, "what the broker no longer has is gone once it has said all"
    link = KeeperLink(node.directory / "keeper.sock", timeout_s=5.0)
    kept = link.adopt()
    for _, _, fd in kept:
        os.close(fd)
    assert sorted(name for name, _, _ in kept) == ["slab/b", "slab/d"]


def test_a_keeper_that_was_stopped_for_long_obeys_the_last_of_several_connections(node):
    """A broker that gives a silent keeper up connects again, and again."""
    node.start_keeper()
    node.await_keeper()
    path = node.directory / "keeper.sock"
    node.keeper.send_signal(signal.SIGSTOP)
    links = [connect(path, timeout_s=10.0) for _ in range(4)]
    for number, link in enumerate(links):
        send_frame(link, {"op": "refill"})
        send_frame(link, {"op": "put", "name": f"lease/{number}", "metadata": {}})
        send_frame(link, {"op": "refilled"})
    for link in links[:-1]:
        link.shutdown(socket.SHUT_RDWR)
    node.keeper.send_signal(signal.SIGCONT)
    answers = [recv_frame(links[-1])[0] for _ in range(3)]
    assert answers[-1] == {"ok": True, "records": 1}
    send_frame(links[-1], {"op": "take_all"})
    assert recv_frame(links[-1])[0]["name"] == "lease/3"
    assert node.keeper.poll() is None
    for link in links:
        link.close()


def test_a_stopped_broker_is_said_to_be_silent(mesh):
    slab = fill(mesh.session(), "s", 5)
    session = mesh.session("reference-0", "reference", timeout_s=1.0)
    session.ledger()  # from here on there is a connection, which takes requests in
    mesh.broker.send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="the broker: no answer within 1 s") as caught:
        session.ledger()
    assert caught.value.reason == "BROKER_SILENT"
    mesh.broker.send_signal(signal.SIGCONT)
    assert session.list_slabs() == (slab,)


def test_deleted_slabs_do_not_come_back(mesh):
    session = mesh.session()
    fill(session, "s", 1)
    session.delete("s")
    kill(mesh.broker)
    mesh.start_broker()
    assert session.list_slabs() == ()
    assert session.ledger().host_slab_bytes == 0


def test_a_drained_broker_leaves_everything_to_its_successor(mesh):
    session = mesh.session()
    slab = fill(session, "s", 3)
    held = session.lease("s", READ)
    mesh.broker.terminate()
    assert mesh.broker.wait(15) == 0
    mesh.start_broker()
    assert session.list_slabs() == (slab,)
    assert not held.lost
    held.release()
    session.lease("s", WRITE).release()


def test_many_threads_over_two_restarts(mesh):
    session = mesh.session(timeout_s=20)
    slabs = [fill(session, f"s/{index}", index) for index in range(4)]
    ended = threading.Event()

    def work(index):
        rounds = 0
        while not ended.is_set():
            name = f"s/{index}"
            assert content(session, name) == bytes([index]) * 1000
            session.create(f"made/{index}/{rounds}", object_class="optimizer_state", size_bytes=64)
            session.delete(f"made/{index}/{rounds}")
            rounds += 1
        return rounds

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, index) for index in range(4)]
        for _ in range(2):
            time.sleep(0.5)
            kill(mesh.broker)
            mesh.start_broker()
            session.list_slabs()
        time.sleep(0.5)
        ended.set()
        assert all(future.result() > 10 for future in futures)
    assert session.list_slabs() == tuple(slabs)
    for index in range(4):
        session.lease(f"s/{index}", WRITE).release()


def test_without_any_keeper_leases_are_lost_and_say_so(node):
    node.options.append("broker.keeper=false")
    node.start_broker()
    session = node.session()
    fill(session, "s", 3)
    held = session.lease("s", READ)
    kill(node.broker)
    node.start_broker()
    assert session.list_slabs() == ()
    assert held.lost
    held.release()
    with pytest.raises(NotFound):
        session.lease("s", READ)


def test_a_broker_waits_for_its_keeper_and_gives_up_with_a_reason(node):
    node.options[-1] = "broker.keeper_timeout_s=0.3"
    command = [sys.executable, "-m", "rollplex.broker"]
    for option in node.options:
        command += ["--set", option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "KEEPER_DOWN: no keeper answers" in done.stderr


def test_a_second_broker_is_refused(mesh):
    mesh.session()
    command = [sys.executable, "-m", "rollplex.broker"]
    for option in [*mesh.options, "broker.keeper=false"]:
        command += ["--set", option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "in use" in done.stderr
