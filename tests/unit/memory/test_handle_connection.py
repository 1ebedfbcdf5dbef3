"""An engine's end of the handle socket, against a peer that the test plays."""

from __future__ import annotations

import threading

import pytest

from rollplex.core.errors import Unavailable
from rollplex.memory import handle_connection
from rollplex.memory.handle_connection import HandleConnection
from rollplex.rpc.handles import listen, recv_frame, send_frame


@pytest.fixture
def ends(tmp_path):
    """The connection and its peer, past the hello."""
    listener = listen(tmp_path / "h.sock")
    peers = []

    def greet():
        peer, _ = listener.accept()
        peers.append(peer)
        recv_frame(peer)
        send_frame(peer, {"session": "secret", "resumed": []})

    greeting = threading.Thread(target=greet)
    greeting.start()
    connection = HandleConnection(tmp_path / "h.sock", "trainer-0", "trainer", 5.0)
    greeting.join()
    yield connection, peers[0]
    connection.close()
    peers[0].close()
    listener.close()


def test_a_descriptor_is_not_closed_under_a_thread_that_is_about_to_wait_for_it(ends, monkeypatch):
    """poll() is given a number: closed before, it would wait for whatever has that number next."""
    connection, peer = ends
    about_to_wait, go_on = threading.Event(), threading.Event()
    open_then, failures = [], []

    def slow_recv_frame(sock):
        about_to_wait.set()
        go_on.wait(5)
        open_then.append(sock.fileno() >= 0)
        return recv_frame(sock)

    def ask():
        try:
            connection.redeem("ticket")
        except Unavailable as error:
            failures.append(error.reason)

    monkeypatch.setattr(handle_connection, "recv_frame", slow_recv_frame)
    asking, closing = threading.Thread(target=ask), threading.Thread(target=connection.close)
    asking.start()
    about_to_wait.wait(5)
    closing.start()
    assert recv_frame(peer)[0]["op"] == "redeem"
    assert recv_frame(peer) is None, "it is shut at once"
    closing.join(0.05)
    go_on.set()
    asking.join(5)
    closing.join(5)
    assert open_then == [True]
    assert failures == ["HANDLE_SOCKET_DOWN"]


def test_closing_ends_a_wait_for_an_answer(ends):
    connection, peer = ends
    failures = []

    def ask():
        try:
            connection.redeem("ticket")
        except Unavailable as error:
            failures.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    recv_frame(peer)
    connection.close()
    asking.join(2)
    assert not asking.is_alive()
    assert len(failures) == 1
    assert "no answer" not in failures[0]


def test_once_closed_it_stays_so(ends):
    connection, _ = ends
    connection.close()
    with pytest.raises(Unavailable) as caught:
        connection.redeem("ticket")
    assert caught.value.reason == "HANDLE_SOCKET_DOWN"
    connection.close()
