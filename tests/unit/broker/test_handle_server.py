"""The handle server inside the test's process, where the peer's credentials can be made up."""

from __future__ import annotations

import asyncio
import os
import socket

import another_user
import pytest

from rollplex.broker import handle_server
from rollplex.broker.engine import Custody
from rollplex.broker.handle_server import HandleServer
from rollplex.broker.records import NoVault
from rollplex.rpc.handles import Peer, connect, listen, recv_frame_async, send_frame


@pytest.fixture
async def served(tmp_path):
    custody = Custody(NoVault(), host_limit_bytes=0)
    server = HandleServer(tmp_path / "h.sock", custody)
    server.start()
    yield custody, tmp_path / "h.sock"
    await server.close()
    custody.close()


def dial(path):
    sock = connect(path, timeout_s=2)
    sock.setblocking(False)
    return sock


async def test_another_users_process_is_refused(served, monkeypatch):
    custody, path = served
    monkeypatch.setattr(handle_server, "peer_of", lambda sock: Peer(os.getpid(), os.getuid() + 1))
    sock = dial(path)
    message, _ = await recv_frame_async(sock, 2)
    assert message["error"]["kind"] == "Forbidden"
    assert message["error"]["reason"] == "PEER_UID"
    assert await recv_frame_async(sock, 2) is None
    assert custody.sessions.by_secret == {}
    sock.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_by_directory_by_mode_and_by_credentials(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    path, custody = tmp_path / "run" / "h.sock", Custody(NoVault(), host_limit_bytes=0)
    server = HandleServer(path, custody)
    server.start()
    another_user.let_through(tmp_path)

    async def outcome():
        return await asyncio.to_thread(another_user.connect, path, socket.SOCK_SEQPACKET)

    assert await outcome() == b"refused", "the directory"
    (tmp_path / "run").chmod(0o777)
    assert await outcome() == b"refused", "the socket's mode"
    path.chmod(0o666)
    assert b'"reason":"PEER_UID"' in await outcome(), "the kernel's credentials"
    assert custody.sessions.by_secret == {}
    await server.close()
    custody.close()


def test_another_users_listener_is_not_talked_to(tmp_path, monkeypatch):
    listener = listen(tmp_path / "h.sock")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        connect(tmp_path / "h.sock", timeout_s=2)
    listener.close()


async def test_a_silent_connection_is_closed(served, monkeypatch):
    _, path = served
    monkeypatch.setattr(handle_server, "HELLO_TIMEOUT_S", 0.05)
    sock = dial(path)
    assert await recv_frame_async(sock, 2) is None
    sock.close()


async def test_the_end_of_a_connection_ends_its_session(served):
    custody, path = served
    sock = dial(path)
    send_frame(sock, {"op": "hello", "process": "trainer-0", "role": "trainer"})
    message, _ = await recv_frame_async(sock, 2)
    assert custody.sessions.get(message["session"]).pid == os.getpid()
    sock.close()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not custody.sessions.by_secret:
            break
    assert custody.sessions.by_process == {}


async def test_a_bug_ends_the_connection_instead_of_the_answer(served, monkeypatch):
    custody, path = served
    sock = dial(path)
    send_frame(sock, {"op": "hello", "process": "trainer-0", "role": "trainer"})
    await recv_frame_async(sock, 2)
    monkeypatch.setattr(custody, "redeem", lambda session, ticket: {}["bug"])
    send_frame(sock, {"op": "redeem", "ticket": "ticket-1"})
    assert await recv_frame_async(sock, 2) is None
    assert custody.sessions.by_process == {}
    sock.close()


async def test_two_connections_of_one_name_do_not_chase_each_other(served):
    _, path = served
    first, second = dial(path), dial(path)
    for sock in (first, second):
        send_frame(sock, {"op": "hello", "process": "trainer-0", "role": "trainer"})
    assert "session" in (await recv_frame_async(first, 2))[0]
    assert (await recv_frame_async(second, 2))[0]["error"]["reason"] == "PROCESS_NAME_IN_USE"
    send_frame(first, {"op": "ping"})
    assert (await recv_frame_async(first, 2))[0] == {"ok": True}
    first.close()
    second.close()
