"""Importing what a service needs, without Python's collector going through it again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Around a program's heavy imports, at most once, before it has threads or objects of its own.

    Modules stay until the process ends: a collection between two imports finds nothing, and was a fifth of an engine's start
    (1 s of 4.5 s of CPU). At the end all that is there is frozen, so that no later collection looks at it either: a full one
    took 0.25 s for transformers' and torch's modules alone, and the whole process waited for it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
