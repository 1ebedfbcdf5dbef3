"""Frames of the handle socket and the keeper's socket: one JSON object a packet, at most one file descriptor beside it.

The sockets are SOCK_SEQPACKET: a frame arrives whole, together with its descriptor, or not at all. No grpc here.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import math
import os
import resource
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core import errors

MAX_FRAME_BYTES = 64 * 1024
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)

Frame = tuple[dict[str, Any], int | None]
"""A message and the descriptor that came with it, which the receiver closes."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel recorded it."""

    pid: int
    """0 when it is not visible from this PID namespace."""
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def check_peer(peer: Peer) -> None:
    """Raises Forbidden for another user's process, or one whose pid is not visible (it could not be fenced)."""
    if peer.uid != os.getuid():
        raise errors.Forbidden(f"uid {peer.uid} may not use this socket, which is uid {os.getuid()}'s",
                               reason="PEER_UID", uid=peer.uid)
    if peer.pid <= 0:
        raise errors.Forbidden("the peer's pid is not visible; run the services of a node in one PID namespace",
                               reason="PEER_PID")


def encode(message: dict[str, Any]) -> bytes:
    """Raises BadInput above MAX_FRAME_BYTES."""
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise errors.BadInput(f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are allowed",
                              reason="FRAME_TOO_LARGE")
    return data


def decode(data: bytes) -> dict[str, Any]:
    """Raises BadInput for anything that is not one JSON object of finite numbers, which `encode` could not send on."""
    try:
        message = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise errors.BadInput(f"a frame is no JSON: {error}", reason="FRAME_MALFORMED") from None
    if not isinstance(message, dict):
        raise errors.BadInput("a frame must be a JSON object", reason="FRAME_MALFORMED")
    return message


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return value


def send_data(sock: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Sends an encoded frame. Raises OSError, BlockingIOError included."""
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def send_frame(sock: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    send_data(sock, encode(message), fd)


def recv_frame(sock: socket.socket) -> Frame | None:
    """The next frame; None at the end of the connection. Raises BadInput for a malformed one, OSError."""
    data, ancillary, flags, _ = sock.recvmsg(MAX_FRAME_BYTES + 1, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if flags & socket.MSG_TRUNC or len(data) > MAX_FRAME_BYTES:
            raise errors.BadInput(f"a frame above {MAX_FRAME_BYTES} bytes", reason="FRAME_TOO_LARGE")
        if flags & socket.MSG_CTRUNC or len(fds) > 1:
            raise errors.BadInput("more than one descriptor in a frame", reason="FRAME_MALFORMED")
        if not data:
            _close_all(fds)
            return None
        return decode(data), fds[0] if fds else None
    except errors.BadInput:
        _close_all(fds)
        raise


def _close_all(fds: array.array) -> None:
    for fd in fds:
        os.close(fd)


async def wait_readable(fd: int, timeout_s: float | None = None) -> None:
    """Returns once `fd` has something to read, or its end. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait_for(ready, timeout_s)
    finally:
        loop.remove_reader(fd)


async def recv_frame_async(sock: socket.socket, timeout_s: float | None = None) -> Frame | None:
    """`recv_frame` on a non-blocking socket. Raises TimeoutError besides."""
    while True:
        try:
            return recv_frame(sock)
        except BlockingIOError:
            await wait_readable(sock.fileno(), timeout_s)


def error_frame(error: errors.RollplexError) -> dict[str, Any]:
    return {"error": {"kind": type(error).__name__, "reason": error.reason, "message": str(error)[:4096],
                      "metadata": error.metadata}}


def raise_error_frame(message: dict[str, Any]) -> None:
    """Raises the domain error that the frame carries, if it carries one."""
    if "error" not in message:
        return
    detail = message["error"] if isinstance(message["error"], dict) else {"message": message["error"]}
    kind = getattr(errors, str(detail.get("kind")), errors.InternalError)
    if not (isinstance(kind, type) and issubclass(kind, errors.RollplexError)):
        kind = errors.InternalError
    metadata = detail.get("metadata") if isinstance(detail.get("metadata"), dict) else {}
    raise kind(str(detail.get("message")), reason=str(detail.get("reason")),
               **{key: value for key, value in metadata.items() if key not in ("self", "message", "reason")})


def listen(path: Path) -> socket.socket:
    """A listening socket of mode 0600. A file that nobody listens on is replaced; raises BadInput when somebody does."""
    if path.exists():
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            connect(path, timeout_s=1.0).close()
            raise errors.BadInput(f"{path} is in use by a running service; stop it or choose another runtime directory",
                                  reason="ADDRESS_IN_USE", address=path)
        path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


def connect(path: Path, *, timeout_s: float) -> socket.socket:
    """A connected socket whose operations take at most `timeout_s`. Raises OSError, also for another user's listener."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # While the listener's queue is full a non-blocking connect fails at once; a blocking one waits for this long.
    whole_s = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6)))
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    if peer_of(sock).uid != os.getuid():
        sock.close()
        raise PermissionError(f"{path} is served by another user")
    sock.settimeout(timeout_s)
    return sock


def has_exited(pidfd: int) -> bool:
    """Whether the process behind a pidfd is gone."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def allow_most_fds() -> None:
    """Raises the soft limit on descriptors to the hard one: a custodian holds one a slab."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
