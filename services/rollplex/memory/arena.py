"""An engine's account of bytes outside slabs, by object class and residency."""

from __future__ import annotations

import threading
from collections import Counter

from rollplex.core.residency import Residency
from rollplex.core.work import ResidencyEntry

Key = tuple[str, Residency]


class Hold:
    """Some bytes of one object class, until `release`."""

    def __init__(self, arena: Arena, object_class: str, residency: Residency, size_bytes: int) -> None:
        self.object_class, self.residency, self.size_bytes = object_class, residency, size_bytes
        self._arena = arena

    def release(self) -> None:
        """Idempotent."""
        self._arena._holds.discard(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Arena:
    """`hold` and `Hold.release` are the pair. Thread-safe, and a finalizer may release too: that takes no lock."""

    def __init__(self, role: str, device: str) -> None:
        self.role, self.device = role, device
        self._holds: set[Hold] = set()
        self._peaks: dict[Key, int] = {}
        self._lock = threading.Lock()

    def hold(self, object_class: str, residency: Residency, size_bytes: int) -> Hold:
        if size_bytes < 0:
            raise ValueError(f"{object_class}: {size_bytes} bytes cannot be held")
        hold = Hold(self, object_class, residency, size_bytes)
        self._holds.add(hold)
        self._raise_peaks()
        return hold

    def release_class(self, object_class: str) -> int:
        """Releases all holds of a class; returns their bytes."""
        its = [hold for hold in list(self._holds) if hold.object_class == object_class]
        for hold in its:
            hold.release()
        return sum(hold.size_bytes for hold in its)

    def held_bytes(self, object_class: str) -> int:
        """Wherever they are."""
        return sum(hold.size_bytes for hold in list(self._holds) if hold.object_class == object_class)

    def entries(self) -> tuple[ResidencyEntry, ...]:
        """Now, with the peaks since the last call; what was held since then and is gone has size 0."""
        with self._lock:
            now = self._totals()
            peaks, self._peaks = self._peaks, dict(now)
        return tuple(ResidencyEntry(name, self.role, self.device, residency.value, now[name, residency],
                                    max(peaks.get((name, residency), 0), now[name, residency]))
                     for name, residency in sorted({*peaks, *now}))

    def _totals(self) -> Counter[Key]:
        totals: Counter[Key] = Counter()
        for hold in list(self._holds):
            totals[hold.object_class, hold.residency] += hold.size_bytes
        return totals

    def _raise_peaks(self) -> None:
        with self._lock:
            for key, size in self._totals().items():
                self._peaks[key] = max(self._peaks.get(key, 0), size)
