"""Spans of an iteration: what ran when. Feeds the event stream, the metrics and equation 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollplex.coordinator.records import PhaseSpan
from rollplex.core.phases import Phase


class Timeline:
    """Seconds since the iteration began, by span name; a span that occurs twice adds up."""

    def __init__(self, emit: Callable[[PhaseSpan], None]) -> None:
        self._emit = emit
        self._began = time.monotonic()
        self.spans: dict[str, list[tuple[float, float]]] = {}
        """Name -> [(start_s, duration_s), ...]."""

    def go_on_at(self, elapsed_s: float) -> None:
        """Of an iteration that began that long ago, under an earlier coordinator."""
        self._began = time.monotonic() - elapsed_s

    def now_s(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def span(self, phase: Phase, name: str) -> Iterator[None]:
        start_s = self.now_s()
        self._emit(PhaseSpan(phase.value, name, False, start_s))
        try:
            yield
        finally:
            duration_s = self.now_s() - start_s
            self.spans.setdefault(name, []).append((start_s, duration_s))
            self._emit(PhaseSpan(phase.value, name, True, start_s, duration_s))

    def seconds(self, name: str) -> float:
        return sum(duration_s for _, duration_s in self.spans.get(name, ()))
