"""Importing what a service needs, without Python's collector going through it again and again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Around a program's heavy imports, before it has much of its own that may become garbage.

    Modules stay until the process ends: a collection between two imports finds nothing, and was a fifth of an engine's start
    (1 s of 4.5 s of CPU). At the end all that is there is frozen, so that no later collection looks at it either: a full one
    took 0.25 s for transformers' and torch's modules alone, while the process waited, and 1.2 s when it ended.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # A second time, in one process, there may be garbage, which would stay.
        if len(sys.modules) > known:
            gc.freeze()
        gc.enable()
