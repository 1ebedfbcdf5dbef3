"""The broker's connection to its keeper: ordered, re-established with back-off, and refilled after the keeper's restart."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.broker.records import Record
from rollplex.core.errors import BadInput, InternalError, Unavailable
from rollplex.rpc.handles import connect, encode, raise_error_frame, recv_frame, recv_frame_async, send_data, send_frame

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0


@dataclass(slots=True)
class _Request:
    data: bytes
    fd: int | None
    """Owned."""
    sent_s: float
    answer: asyncio.Future | None


class KeeperLink:
    """rollplex.broker.records.Vault over the keeper's socket."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._sock: socket.socket | None = None
        self._outbox: deque[_Request] = deque()
        self._unanswered: deque[_Request] = deque()
        self._up = asyncio.Event()
        self._wanted = asyncio.Event()
        """Set while a `put` waits for the keeper."""
        self._waiting = 0
        self._task: asyncio.Task | None = None

    def adopt(self) -> list[Record]:
        """Connects, waiting until the keeper is there, and takes everything it keeps. The caller owns the descriptors.

        Blocking: it runs before anything is served. Raises Unavailable when no keeper appears in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                sock = connect(self._path, timeout_s=self._timeout_s)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"no keeper answers on {self._path}: {error}; start it, or set broker.keeper=false",
                                      reason="KEEPER_DOWN") from error
                time.sleep(0.05)
        kept: list[Record] = []
        try:
            send_frame(sock, {"op": "take_all"})
            while frame := recv_frame(sock):
                message, fd = frame
                raise_error_frame(message)
                if "ok" in message:
                    self._sock = sock
                    return kept
                kept.append((message["name"], message["metadata"], fd))
        except OSError as error:
            raise Unavailable(f"the keeper does not answer: {error}", reason="KEEPER_DOWN") from error
        raise Unavailable("the keeper closed the connection", reason="KEEPER_DOWN")

    def follow(self, everything: Callable[[], Iterable[Record]]) -> None:
        """Starts the task that reads answers and, after a loss, connects again and hands over `everything`."""
        self._sock.setblocking(False)
        self._up.set()
        self._task = asyncio.get_running_loop().create_task(self._run(everything))

    async def put(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    await self._until_up()
                    answer = asyncio.get_running_loop().create_future()
                    self._send({"op": "put", "name": name, "metadata": metadata}, fd, answer)
                    await answer
                return
            except ConnectionError:
                continue
            except TimeoutError:
                raise Unavailable(f"the keeper did not take {name} within {self._timeout_s:g} s",
                                  reason="KEEPER_DOWN") from None

    async def _until_up(self) -> None:
        self._waiting += 1
        self._wanted.set()
        try:
            await self._up.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()

    def note(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        if self._up.is_set():
            self._send({"op": "put", "name": name, "metadata": metadata}, fd, None)

    def drop(self, name: str) -> None:
        if self._up.is_set():
            self._send({"op": "drop", "name": name}, None, None)

    async def forget(self, name: str) -> None:
        if not self._up.is_set():
            return
        answer = asyncio.get_running_loop().create_future()
        self._send({"op": "drop", "name": name}, None, answer)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await answer

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lose(ConnectionError("the link was closed"))

    def _send(self, message: dict[str, Any], fd: int | None, answer: asyncio.Future | None) -> None:
        data = encode(message)
        kept = None if fd is None else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        self._outbox.append(_Request(data, kept, time.monotonic(), answer))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outbox and self._sock is not None:
            request = self._outbox[0]
            try:
                send_data(self._sock, request.data, request.fd)
            except BlockingIOError:
                loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                self._lose(error)
                return
            self._outbox.popleft()
            self._unanswered.append(request)
            if request.fd is not None:
                os.close(request.fd)
                request.fd = None
        if self._sock is not None:
            loop.remove_writer(self._sock.fileno())

    def _lose(self, error: Exception) -> None:
        """The connection is gone; whoever waits for an answer tries again."""
        self._up.clear()
        if self._sock is not None and self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self._sock.fileno())
            # The reader still waits on the descriptor: shutdown wakes it, and it closes the socket.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        for request in [*self._outbox, *self._unanswered]:
            if request.fd is not None:
                os.close(request.fd)
            if request.answer is not None and not request.answer.done():
                request.answer.set_exception(ConnectionResetError(str(error)))
        self._outbox.clear()
        self._unanswered.clear()

    async def _run(self, everything: Callable[[], Iterable[Record]]) -> None:
        while True:
            try:
                await self._read_answers()
            except (OSError, TimeoutError, BadInput, InternalError) as error:
                log.error("the keeper is lost: %s: %s; new slabs wait until it is back", type(error).__name__, error)
                self._lose(error)
            finally:
                self._sock.close()
            await self._reconnect(everything)

    async def _read_answers(self) -> None:
        while True:
            try:
                frame = await recv_frame_async(self._sock, self._timeout_s)
            except TimeoutError:
                waiting = self._unanswered or self._outbox
                if waiting and time.monotonic() - waiting[0].sent_s > self._timeout_s:
                    raise
                continue
            if frame is None:
                raise ConnectionResetError("it closed the connection")
            raise_error_frame(frame[0])
            if not self._unanswered:
                raise ConnectionResetError("it answered what was not asked")
            answer = self._unanswered.popleft().answer
            if answer is not None and not answer.done():
                answer.set_result(None)

    async def _reconnect(self, everything: Callable[[], Iterable[Record]]) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                self._sock = connect(self._path, timeout_s=1.0)
                break
            except OSError:
                await self._back_off(delay_s)
                delay_s = min(2 * delay_s, LAST_RETRY_S)
        self._sock.setblocking(False)
        self._up.set()
        self._send({"op": "refill"}, None, None)
        kept = 0
        for record in everything():
            self.note(*record)
            kept += 1
        self._send({"op": "refilled"}, None, None)
        log.warning("the keeper is back and was given %d records", kept)

    async def _back_off(self, delay_s: float) -> None:
        """Asleep for long, the link would find the keeper only after the time of a `put` that waits for it."""
        if self._wanted.is_set():
            await asyncio.sleep(FIRST_RETRY_S)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), delay_s)
