"""The handle socket: checks who connects, passes descriptors, and turns the end of a connection into dropped leases.

README.md lists the frames. A connection is a session; requests are answered in order, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import socket
from pathlib import Path
from typing import Any

from rollplex.broker.engine import Custody
from rollplex.broker.sessions import Session
from rollplex.core.errors import BadInput, RollplexError
from rollplex.rpc.handles import (
    Frame,
    check_peer,
    error_frame,
    listen,
    peer_of,
    recv_frame_async,
    send_frame,
    wait_readable,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
Reply = tuple[dict[str, Any], int | None]
"""A message and a descriptor to be sent with it and closed."""


class HandleServer:
    """`start` and `close` are the pair."""

    def __init__(self, path: Path, custody: Custody) -> None:
        self._path, self._custody = path, custody
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task] = set()

    def start(self) -> None:
        """Raises BadInput when another broker listens there."""
        self._listener = listen(self._path)
        self._listener.setblocking(False)
        self._spawn(self._accept())

    async def close(self) -> None:
        """Ends all connections. Their leases are left to the successor, which gets them from the keeper."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a handle connection failed", exc_info=task.exception())

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                await wait_readable(self._listener.fileno())
            except OSError as error:
                # Out of descriptors: those who wait in the queue stay there until some are free.
                log.error("cannot accept a handle connection: %s", error)
                await asyncio.sleep(0.1)
            else:
                connection.setblocking(False)
                self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        orderly = False
        try:
            pidfd = self._admit(connection)
            session = await self._hello(connection, pidfd)
            while frame := await recv_frame_async(connection):
                if frame[0].get("op") == "bye":
                    orderly = True
                    break
                await self._answer(connection, session, frame)
        except RollplexError as error:
            log.warning("handle connection refused: %s: %s", error.reason, error)
            with contextlib.suppress(OSError):
                send_frame(connection, error_frame(error))
        except (OSError, TimeoutError) as error:
            log.warning("handle connection lost: %s: %s", type(error).__name__, error)
        except Exception:
            # The client would wait for an answer until its deadline, and the session would never end.
            log.exception("a handle connection failed")
        except asyncio.CancelledError:
            # The broker stops: its successor decides about the leases.
            connection.close()
            raise
        if session is not None:
            self._custody.disconnect(session, orderly=orderly)
            if orderly:
                with contextlib.suppress(OSError):
                    send_frame(connection, {"ok": True})
        connection.close()

    def _admit(self, connection: socket.socket) -> int:
        """The peer's pidfd. Raises Forbidden for other users."""
        peer = peer_of(connection)
        check_peer(peer)
        return os.pidfd_open(peer.pid)

    async def _hello(self, connection: socket.socket, pidfd: int) -> Session:
        try:
            frame = await recv_frame_async(connection, HELLO_TIMEOUT_S)
            if frame is None:
                raise ConnectionResetError("it ended before the hello")
            message = _without_fd(frame)
            if message.get("op") != "hello":
                raise BadInput("the first frame must be a hello", reason="FRAME_MALFORMED")

            session, resumed = self._custody.hello(message.get("process"), message.get("role"),
                                                   peer_of(connection).pid, pidfd, _Connection(connection))
        except BaseException:
            os.close(pidfd)
            raise
        try:
            send_frame(connection, {"session": session.secret, "resumed": resumed})
        except OSError:
            self._custody.disconnect(session, orderly=False)
            raise
        log.info("%s connected as pid %d, %d leases resumed", session.name, session.pid, len(resumed))
        return session

    async def _answer(self, connection: socket.socket, session: Session, frame: Frame) -> None:
        """A request that is refused is answered; one that is malformed ends the connection."""
        fd: int | None = None
        try:
            reply, fd = await self._handle(session, frame)
        except RollplexError as error:
            if error.reason == "FRAME_MALFORMED":
                raise
            reply = error_frame(error)
        try:
            # A peer that does not read its answers is not worth waiting for: BlockingIOError ends the connection.
            send_frame(connection, reply, fd)
        finally:
            if fd is not None:
                os.close(fd)

    async def _handle(self, session: Session, frame: Frame) -> Reply:
        op = frame[0].get("op")
        if op == "deposit":
            return await self._deposit(session, frame), None
        message = _without_fd(frame)
        if op == "redeem":
            lease, slab, handle = self._custody.redeem(session, _ticket(message))
            return {"lease_id": lease.lease_id, "slab": dataclasses.asdict(slab)}, handle
        if op == "ping":
            return {"ok": True}, None
        raise BadInput(f"unknown operation {op!r}", reason="FRAME_MALFORMED")

    async def _deposit(self, session: Session, frame: Frame) -> dict[str, Any]:
        message, fd = frame
        if fd is None:
            raise BadInput("a deposit comes with one descriptor", reason="FRAME_MALFORMED")
        try:
            slab = await self._custody.deposit(session, _ticket(message), fd)
        except BaseException:
            os.close(fd)
            raise
        return {"slab": dataclasses.asdict(slab)}


class _Connection:
    """rollplex.broker.sessions.Connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def is_lost(self) -> bool:
        if self._sock.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLRDHUP)
        return bool(poller.poll(0))


def _ticket(message: dict[str, Any]) -> str:
    ticket = message.get("ticket")
    if not isinstance(ticket, str):
        raise BadInput("the frame has no ticket", reason="FRAME_MALFORMED")
    return ticket


def _without_fd(frame: Frame) -> dict[str, Any]:
    message, fd = frame
    if fd is not None:
        os.close(fd)
        raise BadInput(f"operation {message.get('op')!r} takes no descriptor", reason="FRAME_MALFORMED")
    return message
