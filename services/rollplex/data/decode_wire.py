"""What decoder and children say to each other: length-prefixed JSON on a Unix stream socket, descriptors beside it.

parent -> child   frame(request), then every media file's fd, FDS_PER_MESSAGE at most with each filler byte
child -> parent   frame(reply); the slab's fd rides on its first byte when decoding went well
frame             uint32 little-endian length, then that many bytes of JSON
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from typing import Any

LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 256 << 10
MAX_REPLY_BYTES = 4 << 20
FDS_PER_MESSAGE = 200
"""Linux takes 253 in one message."""


def pack(message: dict[str, Any], limit_bytes: int) -> bytes:
    """One frame. Raises ValueError when the JSON is over `limit_bytes`."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > limit_bytes:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {limit_bytes}")
    return LENGTH.pack(len(body)) + body


def unpack_length(header: bytes, limit_bytes: int) -> int:
    """Body length from a frame's four bytes. Raises ValueError over `limit_bytes`."""
    (length,) = LENGTH.unpack(header)
    if length > limit_bytes:
        raise ValueError(f"a message of {length} bytes is announced, the limit is {limit_bytes}")
    return length


def ancillary(fds: list[int]) -> list[tuple[int, int, bytes]]:
    """`sendmsg`'s ancillary data for `fds`."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds).tobytes())] if fds else []


def received_fds(ancdata: list[tuple[int, int, bytes]]) -> list[int]:
    """The fds in what `recvmsg` returned; the caller owns them."""
    fds = array("i")
    for level, kind, data in ancdata:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def ancillary_space(count: int) -> int:
    return socket.CMSG_SPACE(count * array("i").itemsize)
