"""An engine's end of the handle socket: hello, redeem, deposit, bye. One request at a time, thread-safe."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any

from rollplex.core.errors import Unavailable
from rollplex.memory.slab import Slab
from rollplex.rpc.handles import connect, raise_error_frame, recv_frame, send_frame


class HandleConnection:
    """A live connection; once it is broken it stays so. Every method raises Unavailable (HANDLE_SOCKET_DOWN) then."""

    def __init__(self, path: Path, process: str, role: str, timeout_s: float) -> None:
        """Raises the broker's refusal, or Unavailable."""
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        """While the socket is shut or closed: its number must not be another's by then."""
        self._timeout_s = timeout_s
        try:
            self._sock = connect(path, timeout_s=timeout_s)
        except OSError as error:
            raise _down(f"no broker answers on {path}: {error}") from error
        try:
            answer, _ = self._ask({"op": "hello", "process": process, "role": role})
            self.session: str = answer["session"]
            self.resumed: list[str] = answer["resumed"]
        except BaseException:
            self._sock.close()
            raise

    def redeem(self, ticket: str) -> tuple[Slab, int]:
        """The slab and its descriptor, which the caller closes."""
        answer, fd = self._ask({"op": "redeem", "ticket": ticket})
        if fd is None:
            raise _down("the broker sent no descriptor")
        return Slab(**answer["slab"]), fd

    def deposit(self, ticket: str, fd: int) -> Slab:
        """`fd` stays the caller's."""
        answer, _ = self._ask({"op": "deposit", "ticket": ticket}, fd)
        return Slab(**answer["slab"])

    def wait_lost(self, wake_fd: int) -> bool:
        """Blocks until the connection is lost (True) or `wake_fd` becomes readable (False). Only its caller may `close`:
        a descriptor that is waited for must not be reused."""
        poller = select.poll()
        # Without POLLIN: answers belong to whoever asked.
        poller.register(self._sock.fileno(), select.POLLRDHUP)
        poller.register(wake_fd, select.POLLIN)
        return all(fd != wake_fd for fd, _ in poller.poll())

    def say_bye(self) -> None:
        """Tells the broker that nothing is mapped any more."""
        with contextlib.suppress(Unavailable):
            self._ask({"op": "bye"})

    def shut(self) -> None:
        """Breaks the connection; whoever waits for it returns."""
        with self._ending, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Waits until nobody asks any more, which `shut` makes soon: a thread on its way into poll() knows the descriptor
        by its number only, and would wait for whatever has that number next."""
        self.shut()
        with self._asking, self._ending:
            self._sock.close()

    def _ask(self, message: dict[str, Any], fd: int | None = None) -> tuple[dict[str, Any], int | None]:
        with self._asking:
            try:
                send_frame(self._sock, message, fd)
                frame = recv_frame(self._sock)
            except OSError as error:
                # An answer that comes late would be taken for the next one's.
                self.shut()
                what = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                raise _down(f"the broker's handle socket: {what}") from error
        if frame is None:
            raise _down("the broker closed the handle connection")
        try:
            raise_error_frame(frame[0])
        except BaseException:
            if frame[1] is not None:
                os.close(frame[1])
            raise
        return frame


def _down(message: str) -> Unavailable:
    return Unavailable(message, reason="HANDLE_SOCKET_DOWN")
