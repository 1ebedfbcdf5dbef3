"""One decoding child as its parent sees it: started, asked one thing at a time, killed when anything is odd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from rollplex.core.errors import Unavailable
from rollplex.data import decode_wire as wire

START_TIMEOUT_S = 60.0
# One thread a child: the pool is the parallelism, and thread stacks would eat the address-space limit.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ChildDied(Exception):
    """The child closed its socket in the middle of an exchange."""


class DecodeProcess:
    """Not shared: one exchange at a time, and after a failed one only `kill`."""

    def __init__(self, process: Process, sock: socket.socket) -> None:
        self._process, self._sock = process, sock
        self._killed = self._exchanging = False
        self.confined = self.empty_network = False
        """By a seccomp filter; in a network namespace of its own."""

    @classmethod
    async def start(cls) -> DecodeProcess:
        """A child that has said it is ready. Raises Unavailable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollplex.data.decode_child",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(process, ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                hello, fds = await child._receive()
        except (ChildDied, OSError, ValueError) as error:
            child.kill()
            raise Unavailable(
                f"a media decoding child did not start within {START_TIMEOUT_S:.0f} s ({type(error).__name__}); "
                f"try `{sys.executable} -m rollplex.data.decode_child 0`"
            ) from error
        except BaseException:
            child.kill()
            raise
        _close_all(fds)
        child.confined, child.empty_network = hello.get("confined") is True, hello.get("empty_network") is True
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._killed

    async def exchange(self, request: dict[str, Any], files: list[int]) -> tuple[dict[str, Any], list[int]]:
        """(reply, received fds); the caller owns the fds. Raises ChildDied, or ValueError for a broken reply."""
        self._exchanging = True
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, wire.pack(request, wire.MAX_REQUEST_BYTES))
            for first in range(0, len(files), wire.FDS_PER_MESSAGE):
                await self._send_fds(files[first : first + wire.FDS_PER_MESSAGE])
            return await self._receive()
        except OSError as error:
            raise ChildDied from error
        finally:
            self._exchanging = False
            if self._killed:
                self._sock.close()

    def kill(self) -> asyncio.Task[int]:
        """End it now; an exchange that is under way gets ChildDied.

        The returned task ends when the process is reaped; keep it referenced.
        """
        self._killed = True
        if self._process.returncode is None:
            self._process.kill()
        if self._exchanging:
            # Closing a socket that the event loop watches would leave the exchange waiting for ever.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        else:
            self._sock.close()
        return asyncio.ensure_future(self._process.wait())

    async def exit_code(self) -> int | None:
        """The child's own exit code once its socket has closed; None when it hangs on nevertheless."""
        try:
            async with asyncio.timeout(5):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def _send_fds(self, fds: list[int]) -> None:
        while True:
            try:
                self._sock.sendmsg([b"f"], wire.ancillary(fds))
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _ready(self._sock, loop.add_writer, loop.remove_writer)
            else:
                return

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        fds: list[int] = []
        try:
            header = await self._exactly(wire.LENGTH.size, fds)
            body = await self._exactly(wire.unpack_length(header, wire.MAX_REPLY_BYTES), fds)
            message = dict(json.loads(body))
        except BaseException:
            _close_all(fds)
            raise
        return message, fds

    async def _exactly(self, count: int, fds: list[int]) -> bytes:
        data = bytearray()
        loop = asyncio.get_running_loop()
        while len(data) < count:
            try:
                piece, ancdata, _, _ = self._sock.recvmsg(count - len(data), wire.ancillary_space(4), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await _ready(self._sock, loop.add_reader, loop.remove_reader)
                continue
            fds += wire.received_fds(ancdata)
            if not piece:
                raise ChildDied
            data += piece
        return bytes(data)


async def _ready(sock: socket.socket, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(sock, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(sock)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
