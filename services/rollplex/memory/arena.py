"""An engine's account of bytes outside slabs, by object class and residency, with the contract beside it."""

from __future__ import annotations

import threading
from collections import Counter

from rollplex.core.phases import Phase
from rollplex.core.residency import Holding, Residency, check
from rollplex.core.work import ResidencyEntry

Key = tuple[str, Residency]


class Hold:
    """Some bytes of one object class, until `release`."""

    def __init__(self, arena: Arena, object_class: str, residency: Residency, size_bytes: int) -> None:
        self.object_class, self.residency, self.size_bytes = object_class, residency, size_bytes
        self._arena = arena

    def move(self, residency: Residency) -> None:
        """The bytes are elsewhere now. Raises ValueError after release."""
        self._arena._move(self, residency)

    def release(self) -> None:
        """Idempotent."""
        self._arena._release(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Arena:
    """`hold` and `Hold.release` are the pair. Thread-safe."""

    def __init__(self, role: str, device: str) -> None:
        self.role, self.device = role, device
        # Holds are released by the garbage collector too, inside any of our own calls.
        self._lock = threading.RLock()
        self._holds: set[Hold] = set()
        self._bytes: Counter[Key] = Counter()
        self._peaks: dict[Key, int] = {}

    def hold(self, object_class: str, residency: Residency, size_bytes: int) -> Hold:
        if size_bytes < 0:
            raise ValueError(f"{object_class}: {size_bytes} bytes cannot be held")
        hold = Hold(self, object_class, residency, size_bytes)
        with self._lock:
            self._holds.add(hold)
            self._add(hold, 1)
        return hold

    def release_class(self, object_class: str) -> int:
        """Releases all holds of a class; returns their bytes."""
        with self._lock:
            its = [hold for hold in self._holds if hold.object_class == object_class]
            for hold in its:
                self._release(hold)
        return sum(hold.size_bytes for hold in its)

    def held_bytes(self, object_class: str) -> int:
        """Wherever they are."""
        with self._lock:
            return sum(size for (name, _), size in self._bytes.items() if name == object_class)

    def entries(self) -> tuple[ResidencyEntry, ...]:
        """Now, with the peaks since the last call; what was held since then and is gone has size 0."""
        with self._lock:
            keys = sorted({*self._peaks, *(key for key, size in self._bytes.items() if size)})
            found = tuple(ResidencyEntry(name, self.role, self.device, residency.value, self._bytes[name, residency],
                                         self._peaks.get((name, residency), 0)) for name, residency in keys)
            self._peaks = {key: size for key, size in self._bytes.items() if size}
        return found

    def check(self, phase: Phase) -> list[str]:
        """What violates the residency contract in `phase`, as sentences."""
        with self._lock:
            return check(phase, [Holding(name, self.role, self.device, residency, size)
                                 for (name, residency), size in sorted(self._bytes.items())])

    def _add(self, hold: Hold, sign: int) -> None:
        key = hold.object_class, hold.residency
        self._bytes[key] += sign * hold.size_bytes
        self._peaks[key] = max(self._peaks.get(key, 0), self._bytes[key])

    def _move(self, hold: Hold, residency: Residency) -> None:
        with self._lock:
            if hold not in self._holds:
                raise ValueError(f"{hold.object_class}: the hold was released")
            self._add(hold, -1)
            hold.residency = residency
            self._add(hold, 1)

    def _release(self, hold: Hold) -> None:
        with self._lock:
            if hold in self._holds:
                self._holds.remove(hold)
                self._add(hold, -1)
