"""A stand-in for rollplex.engine.prefix_stream.PrefixStream: it notes how often it is entered, and that it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NotedStream:
    def __init__(self) -> None:
        self.entered, self.closed = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        assert not self.closed
        self.entered += 1
        yield

    def close(self) -> None:
        self.closed = True
