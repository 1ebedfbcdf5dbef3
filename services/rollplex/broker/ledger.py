"""Bytes by object class, role, device and phase: slabs, each counted once, and what engines report beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollplex.core.phases import Phase
from rollplex.core.residency import CONTRACT, RUNTIME, Holding, Residency, check
from rollplex.core.work import ResidencyEntry
from rollplex.memory.slab import LedgerRow, Slab, table

Key = tuple[str, str, str, str]
"""Object class, role, device, residency."""


def slab_residency(object_class: str, device: str) -> Residency:
    """A device's slab is hot, a host device's too. A slab in plain host memory is parked, unless its class never is: then the
    host is what computes on it."""
    return Residency.PINNED if device == "host" and CONTRACT[object_class].parked else Residency.HBM


@dataclass(slots=True)
class Account:
    """Slabs under one key."""

    size_bytes: int = 0
    slab_count: int = 0
    by_run: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes and slabs of each run."""

    def add(self, run: str, size_bytes: int, slab_count: int) -> None:
        self.size_bytes += size_bytes
        self.slab_count += slab_count
        had_bytes, had_count = self.by_run.get(run, (0, 0))
        self.by_run[run] = had_bytes + size_bytes, had_count + slab_count
        if not self.by_run[run][1]:
            del self.by_run[run]


@dataclass(slots=True)
class LedgerBook:
    run: str = ""
    iteration: int = -1
    phase: Phase = Phase.IDLE
    accounts: dict[Key, Account] = field(default_factory=dict)
    reports: dict[str, tuple[ResidencyEntry, ...]] = field(default_factory=dict)
    """Last report of each session."""
    peaks: dict[tuple[Phase, Key], int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()
    """Of the phase that ended last, and of reports in the one that began then."""
    relaxed: tuple[str, ...] = ()
    """Classes that this run keeps in HBM in every phase."""
    ended: tuple[Phase, frozenset[str]] | None = None
    """The phase that ended last, and the classes that might be in HBM then; None with a broker that took over since."""
    found: tuple[str, ...] = ()
    """Violations that were handed in with it."""

    def add(self, slab: Slab) -> None:
        key = _key(slab)
        self.accounts.setdefault(key, Account()).add(slab.run, slab.size_bytes, 1)
        self._raise_peak(key)

    def remove(self, slab: Slab) -> None:
        key = _key(slab)
        self.accounts[key].add(slab.run, -slab.size_bytes, -1)
        if not self.accounts[key].slab_count:
            del self.accounts[key]

    def report(self, session: str, entries: tuple[ResidencyEntry, ...]) -> None:
        """Replaces what the session reported last."""
        self.reports[session] = entries
        for entry in entries:
            self._raise_peak(_key(entry), max(entry.peak_bytes - entry.size_bytes, 0))

    def forget(self, session: str) -> None:
        self.reports.pop(session, None)

    def is_at(self, run: str, iteration: int, phase: Phase) -> bool:
        """Whether exactly this phase was entered last."""
        return (run, iteration, phase) == (self.run, self.iteration, self.phase)

    def enter(self, run: str, iteration: int, phase: Phase, relaxed: tuple[str, ...] = (), found: Sequence[str] = ()
              ) -> tuple[str, ...]:
        """Begins a phase. All that is held is checked against the contract of the one that ends, and what engines said last
        that they hold against that of the one that begins: they were told to let go before. `found` goes with what that shows.

        The same phase again gives the same answer, less what has been given back since.
        """
        if self.is_at(run, iteration, phase):
            self._take_back_settled()
            return self.violations
        # What a run kept from its beginning may also be there when it ends, or when the next one begins.
        self.ended = self.phase, frozenset((*self.relaxed, *relaxed))
        self.found = tuple(found)
        self.violations = (*self._held_wrongly(phase), *found)
        if run:
            self.relaxed = relaxed
        if run and run != self.run:
            self.peaks.clear()
        self.run, self.iteration, self.phase = run or self.run, iteration, phase
        for key in {*self.accounts, *(_key(entry) for entry in self._reported())}:
            self._raise_peak(key)
        return self.violations

    def _held_wrongly(self, begun: Phase) -> list[str]:
        ended, allowed = self.ended
        return [*check(ended, self._holdings(), allowed), *check(begun, self._reported_holdings(), allowed)]

    def _take_back_settled(self) -> None:
        """Nothing is added: what engines took since, they took for the phase that began."""
        if self.ended is None:
            return
        still = {*self._held_wrongly(self.phase), *self.found}
        self.violations = tuple(text for text in self.violations if text in still)

    def rows(self, run: str = "") -> tuple[LedgerRow, ...]:
        """Now. Reports carry no run: they belong to the one whose phase it is."""
        rows = []
        for key, account in self.accounts.items():
            size, count = account.by_run.get(run, (0, 0)) if run else (account.size_bytes, account.slab_count)
            if count:
                rows.append(_row(key, "unspecified", size, count))
        if run in ("", self.run):
            reported: dict[Key, int] = {}
            for entry in self._reported():
                reported[_key(entry)] = reported.get(_key(entry), 0) + entry.size_bytes
            rows += [_row(key, "unspecified", size) for key, size in reported.items() if size]
        return tuple(sorted(rows, key=lambda row: (row.object_class, row.role, row.device, row.slab_count)))

    def peak_rows(self, run: str = "") -> tuple[LedgerRow, ...]:
        """By phase, since the current run began; none for another run."""
        if run not in ("", self.run):
            return ()
        order = list(Phase)
        peaks = sorted(self.peaks.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
        return tuple(_row(key, phase.value, size) for (phase, key), size in peaks if size)

    def hbm_bytes(self) -> dict[str, dict[str, int]]:
        """Device -> object class -> bytes in its memory now, slabs and reports. Plain host memory is no device's."""
        held: dict[str, dict[str, int]] = {}
        for holding in self._holdings():
            if holding.residency is Residency.HBM and holding.device != "host" and holding.size_bytes:
                of_device = held.setdefault(holding.device, {})
                of_device[holding.object_class] = of_device.get(holding.object_class, 0) + holding.size_bytes
        return held

    def reported_hbm_bytes(self, device: str) -> int:
        """What engines hold of a device beside slabs."""
        return sum(entry.size_bytes for entry in self._reported()
                   if entry.device == device and entry.residency == Residency.HBM)

    def note_unexplained(self, size_by_device: Mapping[str, int]) -> None:
        """What the driver counts beyond the ledger as the phase ends: a peak of its own, of no role."""
        for device, size in size_by_device.items():
            key = (self.phase, (RUNTIME, "", device, Residency.HBM.value))
            self.peaks[key] = max(self.peaks.get(key, 0), size)

    def table(self) -> str:
        """The current rows as text, a line each."""
        return table(self.rows())

    def _reported(self) -> Iterator[ResidencyEntry]:
        for entries in self.reports.values():
            yield from entries

    def _raise_peak(self, key: Key, above_bytes: int = 0) -> None:
        account = self.accounts.get(key)
        size = account.size_bytes if account else 0
        size += sum(entry.size_bytes for entry in self._reported() if _key(entry) == key) + above_bytes
        self.peaks[self.phase, key] = max(self.peaks.get((self.phase, key), 0), size)

    def _holdings(self) -> Iterable[Holding]:
        for (object_class, role, device, residency), account in self.accounts.items():
            yield Holding(object_class, role, device, Residency(residency), account.size_bytes)
        yield from self._reported_holdings()

    def _reported_holdings(self) -> Iterator[Holding]:
        for entry in self._reported():
            yield Holding(entry.object_class, entry.role, entry.device, Residency(entry.residency), entry.size_bytes)


def _key(held: Slab | ResidencyEntry) -> Key:
    where = slab_residency(held.object_class, held.device) if isinstance(held, Slab) else Residency(held.residency)
    return held.object_class, held.role, held.device, where.value


def _row(key: Key, phase: str, size_bytes: int, slab_count: int = 0) -> LedgerRow:
    *named, residency = key
    return LedgerRow(*named, phase, size_bytes, slab_count, residency)
