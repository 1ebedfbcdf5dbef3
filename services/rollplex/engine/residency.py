"""What an engine holds outside slabs, told to the broker's ledger and kept for the command's result."""

from __future__ import annotations

from rollplex.engine.device import give_back_cache
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession


class ResidencyReport:
    """`send` on the owner thread, at a command's end and when a class has grown."""

    def __init__(self, session: BrokerSession, arena: Arena) -> None:
        self._session, self._arena = session, arena

    def at_barrier(self) -> None:
        """`send`, once the memory of classes that have left is the driver's again."""
        give_back_cache(self._arena.device)
        self.send()

    def send(self) -> None:
        """Peaks are since the last call."""
        self._session.report_residency(self._arena.entries())
