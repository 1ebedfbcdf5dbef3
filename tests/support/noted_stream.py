"""A stand-in for rollplex.engine.prefix_stream.PrefixStream: it notes how often it is entered, and whether it has a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NotedStream:
    def __init__(self) -> None:
        self.entered, self.open = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.open = True
        self.entered += 1
        yield

    def rest(self) -> None:
        self.open = False
