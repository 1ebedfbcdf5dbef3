"""What an engine holds outside slabs, told to the broker's ledger and kept for the command's result."""

from __future__ import annotations

import torch

from rollplex.core.topology import torch_device
from rollplex.engine.device import release_cached
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession


class ResidencyReport:
    """`send` on the owner thread, at a command's end and when a class has grown."""

    def __init__(self, session: BrokerSession, arena: Arena) -> None:
        self._session, self._arena = session, arena

    def at_barrier(self) -> None:
        """`send`, once the memory of classes that have left is the driver's again."""
        release_cached(torch.device(torch_device(self._arena.device)))
        self.send()

    def send(self) -> None:
        """Peaks are since the last call."""
        self._session.report_residency(self._arena.entries())
