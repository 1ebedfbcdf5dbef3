"""The right to map a slab: READ shared, WRITE exclusive, or shared within one update epoch. Pure; the broker keeps one a slab."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollplex.core.errors import Aborted, NotFound


class LeaseMode(StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: str
    slab: str
    session: str
    mode: LeaseMode
    update_epoch: int | None = None
    """Set on a WRITE that shares the slab with the other writers of its update epoch."""


def conflict(held: Lease, wanted: Lease) -> bool:
    """Whether two leases on one slab exclude each other. A session never conflicts with itself."""
    if held.session == wanted.session:
        return False
    if held.mode is LeaseMode.READ and wanted.mode is LeaseMode.READ:
        return False
    same_update = held.update_epoch is not None and held.update_epoch == wanted.update_epoch
    return not (held.mode is LeaseMode.WRITE and wanted.mode is LeaseMode.WRITE and same_update)


@dataclass(slots=True)
class LeaseTable:
    """All live leases; `grant` and `release` are the pair."""

    by_id: dict[str, Lease] = field(default_factory=dict)

    def on_slab(self, slab: str) -> list[Lease]:
        return [lease for lease in self.by_id.values() if lease.slab == slab]

    def of_session(self, session: str) -> list[Lease]:
        return [lease for lease in self.by_id.values() if lease.session == session]

    def grant(self, wanted: Lease) -> None:
        """Adds the lease. Raises Aborted, naming the holders, when one of them excludes it."""
        holders = [held for held in self.on_slab(wanted.slab) if conflict(held, wanted)]
        if holders:
            names = ", ".join(f"{held.session} ({held.mode.value})" for held in holders)
            raise Aborted(f"{wanted.mode.value} on slab {wanted.slab} is excluded by {names}",
                          reason="LEASE_CONFLICT", slab=wanted.slab, holders=names)
        self.by_id[wanted.lease_id] = wanted

    def release(self, lease_id: str, session: str) -> bool:
        """Drops the lease; False when it was not there. Another session's lease is not found."""
        lease = self.by_id.get(lease_id)
        if lease is None:
            return False
        if lease.session != session:
            raise NotFound(f"lease {lease_id} is not held by session {session}", reason="LEASE_NOT_FOUND")
        del self.by_id[lease_id]
        return True

    def release_session(self, session: str) -> list[Lease]:
        """Drops everything that a session holds, as when its connection closes."""
        dropped = self.of_session(session)
        for lease in dropped:
            del self.by_id[lease.lease_id]
        return dropped
