"""What an engine holds outside slabs, told to the broker's ledger and kept for the command's result."""

from __future__ import annotations

from rollplex.core.work import ResidencyEntry
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession


class ResidencyReport:
    """`send` on the owner thread, at a command's end and when a class has grown; `entries` from any thread."""

    def __init__(self, session: BrokerSession, arena: Arena) -> None:
        self.entries: tuple[ResidencyEntry, ...] = ()
        """As last sent."""
        self._session, self._arena = session, arena

    def send(self) -> None:
        """Peaks are since the last call."""
        self.entries = self._arena.entries()
        self._session.report_residency(self.entries)
