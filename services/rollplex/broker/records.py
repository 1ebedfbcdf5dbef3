"""What the keeper keeps for the broker's successor: a name, JSON metadata and, for slabs and sessions, a descriptor."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Protocol

from rollplex.broker.actors import Actor, ActorTable
from rollplex.broker.ledger import LedgerBook
from rollplex.broker.sessions import NoConnection, Session, SessionTable
from rollplex.broker.slabs import SlabStore
from rollplex.core.errors import RollplexError
from rollplex.core.leases import Lease, LeaseMode, LeaseTable
from rollplex.core.phases import Phase
from rollplex.core.snapshots import Snapshot, SnapshotState
from rollplex.memory.slab import Slab

Record = tuple[str, dict[str, Any], int | None]
"""Name, metadata, descriptor (not owned by the record)."""


class Vault(Protocol):
    """Where records go."""

    async def put(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        """Returns once the keeper has it. Raises Unavailable when it does not answer."""

    def note(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        """Sends it, in order, without waiting. A keeper that is down gets everything when it is back."""

    def drop(self, name: str) -> None:
        """Likewise."""

    async def forget(self, name: str) -> None:
        """The same, and returns once the keeper has closed its descriptor, or is lost."""


class NoVault:
    """No keeper: the slabs end with the broker."""

    async def put(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        return

    def note(self, name: str, metadata: dict[str, Any], fd: int | None) -> None:
        return

    def drop(self, name: str) -> None:
        return

    async def forget(self, name: str) -> None:
        return


def slab_name(name: str) -> str:
    return f"slab/{name}"


def session_name(name: str) -> str:
    return f"session/{name}"


def lease_name(lease_id: str) -> str:
    return f"lease/{lease_id}"


def actor_name(run: str) -> str:
    return f"actor/{run}"


def slab(value: Slab, fd: int) -> Record:
    return slab_name(value.name), dataclasses.asdict(value), fd


def session(value: Session) -> Record:
    metadata = {"name": value.name, "process": value.process, "role": value.role, "pid": value.pid}
    return session_name(value.name), metadata, value.pidfd


def lease(value: Lease) -> Record:
    return lease_name(value.lease_id), dataclasses.asdict(value), None


def actor(value: Actor) -> Record:
    state = value.snapshot
    return actor_name(value.run), {"run": value.run, "slabs": list(value.slabs), "writers": sorted(value.writers),
                                   "number": state.number, "state": state.state, "update_epoch": state.update_epoch}, None


def phase(ledger: LedgerBook) -> Record:
    return "phase", {"run": ledger.run, "iteration": ledger.iteration, "phase": ledger.phase,
                     "relaxed": list(ledger.relaxed),
                     "violations": [text[:1024] for text in ledger.violations[:32]]}, None


def everything(slabs: SlabStore, sessions: SessionTable, leases: LeaseTable, actors: ActorTable,
               ledger: LedgerBook) -> list[Record]:
    found = [slab(value, slabs.fds[name]) for name, value in slabs.by_name.items()]
    found += [session(value) for value in [*sessions.by_secret.values(), *sessions.former]]
    found += [lease(value) for value in leases.by_id.values()]
    found += [lease(value) for former in sessions.former for value in former.left.values()]
    found += [actor(value) for value in actors.by_run.values()]
    return [*found, phase(ledger)]


ORDER = ("slab", "session", "lease", "actor", "phase")
"""Kinds of records; each may refer to those before it."""


def rank(record: Record) -> int:
    """Position of its kind in ORDER; kinds of another version of the broker come last."""
    kind = record[0].partition("/")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


class Restored:
    """Fills a successor's tables from records in ORDER. `take` owns each descriptor."""

    def __init__(self, slabs: SlabStore, actors: ActorTable, ledger: LedgerBook) -> None:
        self.refused: dict[str, str] = {}
        """Reason by record."""
        self.serial = 0
        self._slabs, self._actors, self._ledger = slabs, actors, ledger
        self._sessions: dict[str, Session] = {}
        self._leases: list[Lease] = []

    def take(self, record: Record) -> None:
        name, metadata, fd = record
        takers = {"slab": self._take_slab, "session": self._take_session, "lease": self._take_lease,
                  "actor": self._take_actor, "phase": self._take_phase}
        try:
            takers[name.partition("/")[0]](metadata, fd)
        except (RollplexError, KeyError, TypeError, ValueError, OSError) as error:
            self.refused[name] = f"{type(error).__name__}: {error}"
            if fd is not None:
                os.close(fd)

    def sessions(self) -> Iterator[tuple[Session, list[Lease]]]:
        """Every kept session with its leases."""
        for value in self._sessions.values():
            yield value, [lease for lease in self._leases if lease.session == value.name]

    def _take_slab(self, metadata: dict[str, Any], fd: int) -> None:
        value = Slab(**metadata)
        self._slabs.restore(value, fd)
        self._ledger.add(value)

    def _take_session(self, metadata: dict[str, Any], fd: int) -> None:
        value = Session(**metadata, pidfd=int(fd), secret="", connection=NoConnection())
        self._sessions[value.name] = value
        self.serial = max(self.serial, int(value.name.rpartition("#")[2]))

    def _take_lease(self, metadata: dict[str, Any], fd: None) -> None:
        value = Lease(**{**metadata, "mode": LeaseMode(metadata["mode"])})
        self._slabs.get(value.slab)
        if value.session not in self._sessions:
            raise KeyError(f"session {value.session} of the lease was not kept")
        self._leases.append(value)

    def _take_actor(self, metadata: dict[str, Any], fd: None) -> None:
        for name in metadata["slabs"]:
            self._slabs.get(name)
        state = Snapshot(metadata["number"], SnapshotState(metadata["state"]), metadata["update_epoch"])
        self._actors.by_run[metadata["run"]] = Actor(metadata["run"], tuple(metadata["slabs"]), state,
                                                     frozenset(metadata["writers"]))

    def _take_phase(self, metadata: dict[str, Any], fd: None) -> None:
        self._ledger.run, self._ledger.iteration = metadata["run"], metadata["iteration"]
        self._ledger.phase, self._ledger.violations = Phase(metadata["phase"]), tuple(metadata["violations"])
        self._ledger.relaxed = tuple(metadata["relaxed"])
