"""The handle socket against peers that do not keep to its frames."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

import grpc
import pytest

from rollplex.core.leases import LeaseMode
from rollplex.memory.host_driver import sealed_memfd
from rollplex.rpc import handles
from rollplex.rpc.channel import sync_channel
from rollplex.v1 import memory_broker_service_pb2 as pb
from rollplex.v1 import memory_broker_service_pb2_grpc as pb_grpc


@pytest.fixture
def dial(mesh):
    mesh.session("witness", "trainer").create("s", object_class="optimizer_state", size_bytes=100)
    opened = []

    def connect(process="trainer-0"):
        opened.append(handles.connect(mesh.directory / "handles.sock", timeout_s=5))
        if process:
            handles.send_frame(opened[-1], {"op": "hello", "process": process, "role": "trainer"})
            return opened[-1], handles.recv_frame(opened[-1])[0]["session"]
        return opened[-1]

    yield connect
    for sock in opened:
        sock.close()


@pytest.fixture
def stub(mesh, dial):
    with sync_channel(mesh.address) as channel:
        yield pb_grpc.MemoryBrokerServiceStub(channel)


def ask(sock, message, fd=None):
    handles.send_frame(sock, message, fd)
    return handles.recv_frame(sock)


def ticket(stub, session):
    request = pb.AcquireLeaseRequest(session=session, slab="s", mode=pb.LEASE_MODE_READ)
    return stub.AcquireLease(request, timeout=5).ticket


def reason(frame):
    return frame[0]["error"]["reason"]


def test_ping(dial):
    sock, _ = dial()
    assert ask(sock, {"op": "ping"}) == ({"ok": True}, None)


def test_the_hello_comes_first(dial):
    sock = dial(None)
    assert reason(ask(sock, {"op": "ping"})) == "FRAME_MALFORMED"
    assert handles.recv_frame(sock) is None


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff\xfe", b"[" * 50000, b'{"op":"nonsense"}', b'{"op":"redeem"}',
                                  b'{"op":"redeem","ticket":5}', b'{"op":"deposit","ticket":"x"}', b"{}", b'{"op":[]}'])
def test_malformed_frames_get_an_error_and_end_the_connection(dial, data):
    sock, _ = dial()
    handles.send_data(sock, data)
    assert reason(handles.recv_frame(sock)) == "FRAME_MALFORMED"
    assert handles.recv_frame(sock) is None


def test_an_oversized_frame_gets_an_error_and_ends_the_connection(dial):
    sock, _ = dial()
    handles.send_data(sock, b'{"op":"ping","x":"' + b"x" * handles.MAX_FRAME_BYTES + b'"}')
    assert reason(handles.recv_frame(sock)) == "FRAME_TOO_LARGE"
    assert handles.recv_frame(sock) is None


def test_tickets_forged_replayed_and_foreign(dial, stub):
    sock, session = dial()
    other, _ = dial("trainer-1")
    good = ticket(stub, session)
    assert reason(ask(sock, {"op": "redeem", "ticket": "ticket-forged"})) == "TICKET_UNKNOWN"
    assert reason(ask(other, {"op": "redeem", "ticket": good})) == "TICKET_FOREIGN"
    message, fd = ask(sock, {"op": "redeem", "ticket": good})
    assert message["slab"]["name"] == "s"
    os.close(fd)
    assert reason(ask(sock, {"op": "redeem", "ticket": good})) == "TICKET_UNKNOWN"
    assert ask(sock, {"op": "ping"})[0] == {"ok": True}, "a refused ticket does not end the connection"


def test_a_deposit_ticket_redeems_nothing(dial, stub):
    sock, session = dial()
    slab = pb.Slab(name="new", object_class="gradients", device="host", size_bytes=10)
    deposit = stub.CreateSlab(pb.CreateSlabRequest(session=session, slab=slab), timeout=5).deposit_ticket
    assert reason(ask(sock, {"op": "redeem", "ticket": deposit})) == "TICKET_UNKNOWN"
    fd = sealed_memfd("new", 10)
    assert ask(sock, {"op": "deposit", "ticket": deposit}, fd)[0]["slab"]["role"] == "trainer"
    assert reason(ask(sock, {"op": "deposit", "ticket": deposit}, fd)) == "TICKET_UNKNOWN"
    os.close(fd)


def test_the_end_of_a_connection_ends_session_and_leases(mesh, dial, stub):
    sock, session = dial()
    stub.AcquireLease(pb.AcquireLeaseRequest(session=session, slab="s", mode=pb.LEASE_MODE_WRITE), timeout=5)
    handles.send_frame(sock, {"op": "bye"})
    assert handles.recv_frame(sock)[0] == {"ok": True}
    witness = next(item for item in mesh.started if getattr(item, "process", None) == "witness")
    witness.lease("s", LeaseMode.WRITE).release()
    with pytest.raises(grpc.RpcError) as caught:
        ticket(stub, session)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_random_frames_leave_the_broker_alive_and_without_leaks(mesh, dial):
    rng = random.Random(7)
    words = ["op", "hello", "redeem", "deposit", "bye", "ticket", "process", "role", "x" * 70, None, 5, [], {}, True]

    def fds():
        time.sleep(0.3)
        return len(list(Path(f"/proc/{mesh.broker.pid}/fd").iterdir()))

    before = fds()
    for _ in range(300):
        sock = dial(None)
        if rng.random() < 0.5:
            handles.send_frame(sock, {"op": "hello", "process": f"fuzz-{rng.randrange(10**9)}", "role": "trainer"})
        for _ in range(rng.randrange(1, 4)):
            message = {str(rng.choice(words)): rng.choice(words) for _ in range(3)}
            data = json.dumps(message).encode() if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 200))
            try:
                handles.send_data(sock, data, sock.fileno() if rng.random() < 0.3 else None)
            except OSError:
                break
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    sock, _ = dial()
    assert ask(sock, {"op": "ping"})[0] == {"ok": True}
    sock.close()
    assert fds() == before
