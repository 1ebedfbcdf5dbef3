"""What comes of it when another user connects. Root only: the child of a fork becomes nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

NOBODY = 65534


def connect(path: Path, kind: int = socket.SOCK_STREAM) -> bytes:
    """`refused`, the error's text, or the first bytes that the server sends (`connected` if it is no talker)."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        outcome = b"connected"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, kind) as sock:
                sock.connect(str(path))
                if kind == socket.SOCK_SEQPACKET:
                    sock.settimeout(10)
                    outcome = sock.recv(4096)
        except PermissionError:
            outcome = b"refused"
        except OSError as error:
            outcome = repr(error).encode()
        finally:
            os.write(write, outcome)
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as end:
        return end.read()


def let_through(path: Path) -> None:
    """Opens the test's own folders for passing, so that what refuses is the server's."""
    for parent in (path, *path.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
