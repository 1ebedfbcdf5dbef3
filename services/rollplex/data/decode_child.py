"""The process that reads untrusted media: `python -m rollplex.data.decode_child FD` answers requests on socket FD.

It gets open files and numbers, returns one sealed memfd a request, and ends when the socket does. Memory, CPU time
and core dumps are limited by the kernel, which also refuses it new sockets, files, processes and programs (`confine`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import os
import resource
import socket
import sys
from typing import Any

import numpy as np

from rollplex.data import decode_wire as wire
from rollplex.data.confine import confine
from rollplex.data.decode_frames import Clip, MediaFault, decode
from rollplex.data.media import ALIGN_BYTES, SLAB_SEALS, MediaItem

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


class Slab:
    """A memfd that grows item by item and is sealed at the end. `pwrite` keeps it out of the address-space limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.fd = os.memfd_create("rollplex-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size_bytes = 0
        self.limit_bytes = limit_bytes

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes - self._next_offset()

    def _next_offset(self) -> int:
        return math.ceil(self.size_bytes / ALIGN_BYTES) * ALIGN_BYTES

    def append(self, kind: str, clip: Clip) -> MediaItem:
        """Write the frames one after another, 64-byte aligned."""
        offset = position = self._next_offset()
        digest = hashlib.sha256()
        for frame in clip.frames:
            view = memoryview(np.ascontiguousarray(frame)).cast("B")
            digest.update(view)
            while view:
                written = os.pwrite(self.fd, view, position)
                view, position = view[written:], position + written
        self.size_bytes = position
        return MediaItem(
            kind=kind,
            offset_bytes=offset,
            shape=(len(clip.frames), *clip.frames[0].shape),
            fps=clip.fps,
            timestamps_s=tuple(clip.timestamps_s),
            source_frames=clip.source_frames,
            source_duration_s=clip.source_duration_s,
            sha256=digest.hexdigest(),
        )

    def seal(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SLAB_SEALS)


def serve(sock: socket.socket) -> None:
    """Answer requests until the peer hangs up."""
    sock.sendall(wire.pack({"ready": True, "empty_network": _leave_network(), "confined": confine()}, wire.MAX_REPLY_BYTES))
    while (request := _receive(sock)) is not None:
        files: list[int] = []
        slab = None
        try:
            files = _receive_fds(sock, sum(item["files"] for item in request["items"]))
            _limit(request)
            slab = Slab(request["max_slab_bytes"])
            reply, fds = _decode_all(request, files, slab), [slab.fd]
        except MediaFault as fault:
            reply, fds = {"error": fault.reason, "what": fault.what, "file": fault.file, "numbers": fault.numbers}, []
        except MemoryError:
            reply, fds = {"error": "MEDIA_MEMORY"}, []
        _unlimit_memory()
        _send(sock, reply, fds)
        for fd in (*files, *([slab.fd] if slab else [])):
            os.close(fd)


def _decode_all(request: dict[str, Any], files: list[int], slab: Slab) -> dict[str, Any]:
    items, first = [], 0
    for plan in request["items"]:
        own, offset = files[first : first + plan["files"]], first
        first += plan["files"]
        try:
            clip = decode(plan, own, slab.room_bytes)
        except MediaFault as fault:
            fault.file += offset
            raise
        items.append(slab.append(plan["kind"], clip).to_json())
    slab.seal()
    return {"items": items, "size_bytes": slab.size_bytes}


def _limit(request: dict[str, Any]) -> None:
    """Soft limits for this request; the hard ones stay, so that the next may have others."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + request["decode_timeout_s"]) + 1
    _soft(resource.RLIMIT_CPU, cpu_s)
    _soft(resource.RLIMIT_FSIZE, request["max_slab_bytes"])
    _soft(resource.RLIMIT_CORE, 0)
    _soft(resource.RLIMIT_AS, request["child_memory_bytes"])


def _unlimit_memory() -> None:
    """The reply itself must not fail for memory."""
    _soft(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def _soft(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    wanted = value if hard == resource.RLIM_INFINITY else hard if value == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (wanted, hard))


def _leave_network() -> bool:
    """True when this process is now in a network namespace without interfaces."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return unshare(CLONE_NEWNET) == 0 or unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0


def _receive(sock: socket.socket) -> dict[str, Any] | None:
    header = _exactly(sock, wire.LENGTH.size)
    if header is None:
        return None
    body = _exactly(sock, wire.unpack_length(header, wire.MAX_REQUEST_BYTES))
    return None if body is None else json.loads(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None when the peer hung up."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _receive_fds(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < count:
        data, ancdata, _, _ = sock.recvmsg(1, wire.ancillary_space(wire.FDS_PER_MESSAGE), socket.MSG_CMSG_CLOEXEC)
        fds += wire.received_fds(ancdata)
        if not data:
            raise EOFError(f"the parent hung up after {len(fds)} of {count} files")
    return fds


def _send(sock: socket.socket, reply: dict[str, Any], fds: list[int]) -> None:
    data = memoryview(wire.pack(reply, wire.MAX_REPLY_BYTES))
    sent = sock.sendmsg([data], wire.ancillary(fds))
    sock.sendall(data[sent:])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
