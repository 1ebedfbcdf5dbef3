"""The directory that keeps other users from a node's sockets."""

from __future__ import annotations

import os
from pathlib import Path

from rollplex.core.errors import BadInput


def prepare_runtime_dir(path: Path) -> Path:
    """Creates the directory with mode 0700. Raises BadInput when it is another user's or open to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    mode = status.st_mode & 0o777
    if status.st_uid != os.getuid():
        raise BadInput(f"runtime directory {path} is uid {status.st_uid}'s, this is uid {os.getuid()}; its owner could put "
                       "sockets of their own there: name another", reason="RUNTIME_DIR_FOREIGN", path=path)
    if mode & 0o077:
        raise BadInput(f"runtime directory {path} has mode {mode:o}; a socket needs a directory of its own "
                       "that others cannot enter: name one that does not exist yet, or chmod 700 your own",
                       reason="RUNTIME_DIR_OPEN", path=path)
    return path
