"""torch.cuda's streams and events as vector clocks: which accesses to memory are ordered, without a GPU to run them.

Everything executes at once, in the order of the calls, as a GPU might not: `conflicts` lists pairs of accesses to one buffer, one
of them a write, that no event, wait or host synchronisation puts in order.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

HOST = "host"


@dataclass(frozen=True)
class Access:
    where: str
    """Stream, or HOST."""
    time: int
    seen: dict[str, int]
    what: str
    reads: frozenset
    writes: frozenset

    def before(self, other: Access) -> bool:
        return other.seen.get(self.where, 0) >= self.time


class Clocks:
    """Stands in for torch.cuda in a module under test: `Stream`, `Event`, `stream`, `current_stream`."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self._host: Counter[str] = Counter()
        self._made = 0
        self._current = [self.Stream(None, name="default")]

    def Stream(self, device=None, *, name=None):  # noqa: N802
        self._made += 1
        return _Stream(self, name or f"stream{self._made}")

    def Event(self):  # noqa: N802
        return _Event(self)

    def current_stream(self, device=None):
        return self._current[-1]

    @contextmanager
    def stream(self, stream):
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def access(self, what: str, *, reads=(), writes=()) -> None:
        """By the current stream."""
        stream = self._current[-1]
        stream.clock |= self._host
        stream.clock[stream.name] += 1
        self._note(stream.name, stream.clock, what, reads, writes)

    def host_access(self, what: str, *, reads=(), writes=()) -> None:
        self._host[HOST] += 1
        self._note(HOST, self._host, what, reads, writes)

    def _note(self, where, clock, what, reads, writes) -> None:
        self.accesses.append(Access(where, clock[where], dict(clock), what, frozenset(reads), frozenset(writes)))

    def conflicts(self) -> list[str]:
        found = []
        for index, later in enumerate(self.accesses):
            for earlier in self.accesses[:index]:
                touched = earlier.writes & (later.reads | later.writes) | earlier.reads & later.writes
                if touched and not earlier.before(later):
                    found.append(f"{earlier.what} ({earlier.where}) and {later.what} ({later.where})")
        return found


class _Stream:
    def __init__(self, clocks: Clocks, name: str) -> None:
        self._clocks, self.name, self.clock = clocks, name, Counter()

    def wait_event(self, event) -> None:
        self.clock |= event.clock

    def wait_stream(self, stream) -> None:
        self.clock |= stream.clock

    def record_event(self):
        event = _Event(self._clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clocks._host |= self.clock


class _Event:
    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self.clock = clocks, Counter()

    def record(self, stream) -> None:
        self.clock = stream.clock | self._clocks._host

    def synchronize(self) -> None:
        self._clocks._host |= self.clock
