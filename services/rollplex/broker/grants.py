"""Granting leases and update epochs: the rules of update-protocol.md, with the dead fenced first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollplex.broker import records
from rollplex.broker.actors import Actor, ActorTable
from rollplex.broker.fencing import Fence
from rollplex.broker.records import Vault
from rollplex.broker.sessions import SessionTable
from rollplex.broker.slabs import SlabStore
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import Aborted, BadInput, WrongState
from rollplex.core.ids import new_id
from rollplex.core.leases import Lease, LeaseMode, LeaseTable, conflict
from rollplex.memory.slab import Slab


class Grants:
    """Works on the custody's own tables. Every check is made before fencing and, since that waits, once more after it."""

    def __init__(self, slabs: SlabStore, leases: LeaseTable, actors: ActorTable, sessions: SessionTable, fence: Fence,
                 vault: Vault) -> None:
        self.slabs, self.leases, self.actors, self.sessions, self.fence = slabs, leases, actors, sessions, fence
        self._vault = vault
        # While a process is being fenced nobody else may be granted what it held.
        self._granting = asyncio.Lock()

    async def acquire(self, secret: str, name: str, mode: LeaseMode, snapshot: int | None,
                      update_epoch: int | None) -> tuple[Lease, Slab]:
        """Grants a lease. Raises Aborted naming conflicting holders."""
        async with self._granting:
            session = self.sessions.get(secret)
            slab = self.slabs.get(name)
            actor = self.actors.of_slab(name)
            if actor is not None:
                actor.admit(mode, session.process, snapshot, update_epoch)
            elif snapshot is not None or update_epoch is not None:
                raise WrongState(f"slab {name} is no registered snapshot", reason="SNAPSHOT_NOT_REGISTERED", slab=name)
            lease = Lease(new_id("lease"), name, session.name, mode, update_epoch)
            self._check_live_holders(lease, actor)
            for former, left in self.fence.on_slab(name):
                tolerated = actor is not None and actor.tolerates(former.process, left.mode)
                if former.pid != session.pid and conflict(left, lease) and not tolerated:
                    await self.fence.clear(former, f"{mode.value} on slab {name}")
            # While one was being fenced, this connection may have ended, the slab been deleted, or another former holder
            # connected again and taken up its lease.
            self.sessions.get(secret)
            slab = self.slabs.get(name)
            self._check_live_holders(lease, actor)
            self.leases.by_id[lease.lease_id] = lease
            self._vault.note(*records.lease(lease))
            return lease, slab

    def _check_live_holders(self, wanted: Lease, actor: Actor | None) -> None:
        """LeaseTable.grant's rule, but that a writer's own READ lease may stay beside its fellow writers."""
        holders = [held for held in self.leases.on_slab(wanted.slab) if conflict(held, wanted)
                   and not (actor is not None and actor.tolerates(held.session.rpartition("#")[0], held.mode))]
        if holders:
            names = _names(holders)
            raise Aborted(f"{wanted.mode.value} on slab {wanted.slab} is excluded by {names}", reason="LEASE_CONFLICT",
                          slab=wanted.slab, holders=names)

    async def register_snapshot(self, run: str, slabs: tuple[str, ...], number: int) -> None:
        async with self._granting:
            for name in slabs:
                self.slabs.get(name)
            known = self.actors.by_run.get(run)
            if known is None:
                await self._writers_gone(slabs, "registering the snapshot")
            self._keep(self.actors.register(run, slabs, number))
            crash_point("broker.snapshot.registered")

    async def begin_update(self, run: str, number: int, writers: frozenset[str]) -> int:
        """VALID(k) -> TORN(k -> k+1), or TORN under a later epoch. Returns the epoch. Raises Aborted naming the readers
        that are left; those that died or vanished are fenced first."""
        async with self._granting:
            if not writers:
                raise BadInput("an update needs at least one writer", reason="NO_WRITERS")
            actor = self.actors.get(run)
            actor.snapshot.begin_update(number, actor.snapshot.update_epoch + 1)
            self._check_outsiders(actor, writers)
            for name in actor.slabs:
                for former, _ in self.fence.on_slab(name):
                    live = self.sessions.live_with_pid(former.pid)
                    if live is None or live.process not in writers:
                        await self.fence.clear(former, f"the update of run {run}")
            self._check_outsiders(actor, writers)
            actor = self.actors.begin_update(run, number, writers)
            self._keep(actor)
            crash_point("broker.update.granted")
            return actor.snapshot.update_epoch

    async def publish_snapshot(self, run: str, update_epoch: int, number: int) -> None:
        """TORN(k -> k+1) -> VALID(k+1). The same publication again changes nothing. Raises Aborted while a writer is
        left."""
        async with self._granting:
            if self.actors.published(run, number, update_epoch):
                return
            actor = self.actors.get(run)
            actor.snapshot.publish(number, update_epoch)
            await self._writers_gone(actor.slabs, f"publishing snapshot {number}")
            crash_point("broker.publish.checked")
            self._keep(self.actors.publish(run, number, update_epoch))
            crash_point("broker.publish.done")

    def _check_outsiders(self, actor: Actor, writers: frozenset[str]) -> None:
        outside = [lease for name in actor.slabs for lease in self.leases.on_slab(name)
                   if lease.session.rpartition("#")[0] not in writers]
        if outside:
            names = _names(outside)
            raise Aborted(f"run {actor.run}'s actor is still leased by {names}", reason="READERS_REMAIN", holders=names)

    async def _writers_gone(self, slabs: tuple[str, ...], what: str) -> None:
        self._check_no_writer(slabs, what)
        for name in slabs:
            for former, left in self.fence.on_slab(name):
                if left.mode is LeaseMode.WRITE:
                    await self.fence.clear(former, what)
        self._check_no_writer(slabs, what)

    def _check_no_writer(self, slabs: tuple[str, ...], what: str) -> None:
        writing = [lease for name in slabs for lease in self.leases.on_slab(name) if lease.mode is LeaseMode.WRITE]
        if writing:
            names = _names(writing)
            raise Aborted(f"{what} waits for {names}", reason="WRITERS_REMAIN", holders=names)

    def _keep(self, actor: Actor) -> None:
        self._vault.note(*records.actor(actor))


def _names(leases: Iterable[Lease]) -> str:
    return ", ".join(sorted({f"{lease.session.rpartition('#')[0]} ({lease.mode.value})" for lease in leases}))
