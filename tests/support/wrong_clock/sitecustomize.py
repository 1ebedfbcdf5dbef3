"""Puts the wall clock, as our own modules read it, off by the seconds in the file CLOCK_FILE. Libraries keep the true one: gRPC
turns a timeout into a wall time in Python and back in C, which a real jump moves together."""

import os
import sys
import time
from pathlib import Path

_true = time.time
_path = os.environ.get("CLOCK_FILE", "")


def _wrong() -> float:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if not caller.startswith("rollplex"):
        return _true()
    try:
        return _true() + float(Path(_path).read_text() or 0)
    except OSError:
        return _true()


if _path:
    time.time = _wrong
