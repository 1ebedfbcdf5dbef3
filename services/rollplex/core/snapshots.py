"""Snapshot states, as update-protocol.md has them: VALID(k) -> TORN(k -> k+1) -> VALID(k+1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollplex.core.errors import WrongState


class SnapshotState(StrEnum):
    VALID = "valid"
    TORN = "torn"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's actor: which theta its slabs hold, and whether it may be read."""

    number: int
    """VALID: the snapshot. TORN: the one being replaced."""
    state: SnapshotState = SnapshotState.VALID
    update_epoch: int = 0
    """Of the update while TORN; otherwise of the last one."""

    @property
    def readable(self) -> bool:
        return self.state is SnapshotState.VALID

    def begin_update(self, number: int, update_epoch: int) -> Snapshot:
        """VALID(k) -> TORN(k -> k+1). A TORN snapshot takes a later epoch: rolling forward after a death."""
        if number != self.number:
            raise WrongState(f"the snapshot is {self.number}, not {number}", reason="STALE_SNAPSHOT",
                             snapshot=self.number, expected=number)
        if update_epoch <= self.update_epoch:
            raise WrongState(f"update epoch {update_epoch} is not after {self.update_epoch}", reason="STALE_EPOCH")
        return Snapshot(self.number, SnapshotState.TORN, update_epoch)

    def publish(self, number: int, update_epoch: int) -> Snapshot:
        """TORN(k -> k+1) -> VALID(k+1)."""
        if self.state is not SnapshotState.TORN or update_epoch != self.update_epoch:
            raise WrongState(f"no update of epoch {update_epoch} is open", reason="STALE_EPOCH")
        if number != self.number + 1:
            raise WrongState(f"snapshot {number} does not follow {self.number}", reason="STALE_SNAPSHOT")
        return Snapshot(number, SnapshotState.VALID, update_epoch)
