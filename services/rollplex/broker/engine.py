"""Custody: who may map what. Holds descriptors, never maps them. All methods run on one event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollplex.broker import records
from rollplex.broker.actors import ActorTable
from rollplex.broker.fencing import Fence
from rollplex.broker.grants import Grants
from rollplex.broker.hbm import HbmBudget, Reading
from rollplex.broker.ledger import LedgerBook
from rollplex.broker.mps_clients import ClientList
from rollplex.broker.records import Record, Vault
from rollplex.broker.sessions import Connection, Session, SessionTable, check_names, forget_pidfd
from rollplex.broker.slabs import SlabStore, check_announced
from rollplex.broker.tickets import Purpose, TicketBook
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, NotFound, OutOfMemory, WrongState
from rollplex.core.leases import Lease, LeaseMode, LeaseTable
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes, Residency
from rollplex.core.topology import is_host
from rollplex.core.work import ResidencyEntry
from rollplex.memory.slab import Ledger, Slab, SnapshotInfo


class Custody:
    """The broker's work. `vault` is the keeper, or records.NoVault; `host_limit_bytes` 0 is no limit."""

    def __init__(self, vault: Vault, *, host_limit_bytes: int, budget: HbmBudget | None = None, ticket_lifetime_s: float = 30.0,
                 fence_timeout_s: float = 5.0, reconnect_grace_s: float = 10.0,
                 clock: Callable[[], float] = time.monotonic, clients: ClientList | None = None) -> None:
        self.host_limit_bytes = host_limit_bytes
        self.budget = budget or HbmBudget()
        self.slabs = SlabStore()
        self.leases = LeaseTable()
        self.actors = ActorTable()
        self.sessions = SessionTable()
        self.tickets = TicketBook(ticket_lifetime_s)
        self.ledger = LedgerBook()
        self.fence = Fence(self.sessions, self.forget, timeout_s=fence_timeout_s, grace_s=reconnect_grace_s, clock=clock,
                           clients=clients)
        self.grants = Grants(self.slabs, self.leases, self.actors, self.sessions, self.fence, vault)
        self._vault = vault
        self._clock = clock
        self._leaving: dict[str, asyncio.Task[int]] = {}
        """Deleted slabs whose pages are not free yet."""
        self._phase_order = ("", 0)
        """Caller and number of the phase that was entered last."""

    def hello(self, process: object, role: object, pid: int, pidfd: int,
              connection: Connection) -> tuple[Session, list[str]]:
        """Opens a session (which owns the pidfd from here on) and gives it back the leases that the same process's last
        connection left; their ids are returned."""
        name, role_name = check_names(process, role)
        old = self.sessions.superseded(name)
        if old is not None:
            old.connection.hang_up()
            self.disconnect(old, orderly=False)
        self.fence.bury_dead()
        session = self.sessions.open(name, role_name, pid, pidfd, connection)
        self._vault.note(*records.session(session))
        resumed = []
        for former in self.sessions.take_resumable(name, pid):
            for lease in former.left.values():
                taken = Lease(lease.lease_id, lease.slab, session.name, lease.mode, lease.update_epoch)
                self.leases.by_id[taken.lease_id] = taken
                self._vault.note(*records.lease(taken))
                resumed.append(taken.lease_id)
            self._vault.drop(records.session_name(former.name))
            forget_pidfd(former)
        return session, resumed

    def disconnect(self, session: Session, *, orderly: bool) -> None:
        """The connection ended: all its leases are dropped at once. Unless the goodbye was said, or the process is seen
        dead, it may still map what it had: it is fenced before anyone writes there. Idempotent."""
        if self.sessions.by_secret.get(session.secret) is not session:
            return
        self.sessions.close(session)
        self.ledger.forget(session.name)
        for claim in self.tickets.drop_session(session.name):
            if claim.purpose is Purpose.DEPOSIT:
                self.slabs.retract(claim.subject)
        leases = self.leases.release_session(session.name)
        if leases and not orderly:
            self.sessions.leaving(session, leases)
            self.fence.bury_dead()
        else:
            self.forget(session, leases)

    def forget(self, session: Session, leases: Iterable[Lease]) -> None:
        """Nothing of the session is left to be fenced."""
        for lease in leases:
            self._vault.drop(records.lease_name(lease.lease_id))
        self._vault.drop(records.session_name(session.name))
        forget_pidfd(session)

    def announce(self, secret: str, slab: Slab) -> str:
        """Keeps room for a slab and returns the ticket for its descriptor. Raises OutOfMemory with the ledger's table."""
        session = self.sessions.get(secret)
        slab = Slab(slab.name, slab.object_class, slab.role or session.role, slab.device, slab.size_bytes, run=slab.run)
        check_announced(slab)
        self.expire_tickets()
        taken = self.slabs.host_bytes
        if is_host(slab.device) and self.host_limit_bytes and taken + slab.size_bytes > self.host_limit_bytes:
            raise OutOfMemory(
                f"{slab.size_bytes:,} bytes for slab {slab.name} do not fit: {taken:,} of {self.host_limit_bytes:,} host "
                f"bytes are taken\n{self.ledger.table()}", reason="OUT_OF_HOST_MEMORY", size_bytes=slab.size_bytes,
                taken_bytes=taken, limit_bytes=self.host_limit_bytes)
        self.budget.check_slab(slab, self.slabs.device_bytes[slab.device], self.ledger.reported_hbm_bytes(slab.device),
                               self.ledger.table())
        self.slabs.announce(slab)
        return self.tickets.issue(Purpose.DEPOSIT, slab.name, session.name, self._clock())

    async def deposit(self, session: Session, ticket: str, fd: int) -> Slab:
        """Takes an announced slab's descriptor, which stays the caller's until this returns. It is with the keeper then.

        On failure the announcement is withdrawn.
        """
        name = self.tickets.redeem(ticket, Purpose.DEPOSIT, session.name, self._clock()).subject
        try:
            slab = self.slabs.stamp(name, fd)
            crash_point("broker.deposit.received")
            await self._vault.put(*records.slab(slab, fd))
            crash_point("broker.deposit.kept")
        except BaseException:
            self.slabs.retract(name)
            # A keeper that answered too late has it all the same.
            self._vault.drop(records.slab_name(name))
            raise
        self.slabs.accept(slab, fd)
        self.ledger.add(slab)
        return slab

    def list_slabs(self, prefix: str) -> list[Slab]:
        return [self.slabs.by_name[name] for name in sorted(self.slabs.by_name) if name.startswith(prefix)]

    async def delete(self, secret: str, name: str) -> int:
        """Gives the pages back and returns their bytes, once they are free; asked again meanwhile, likewise. Raises WrongState
        while others lease the slab."""
        session = self.sessions.get(secret)
        if name in self.slabs.by_name or name not in self._leaving:
            leaving = asyncio.get_running_loop().create_task(self._free(*self._part_with(session, name)))
            self._leaving[name] = leaving
            leaving.add_done_callback(lambda done: self._leaving.pop(name) if self._leaving.get(name) is done else None)
        # Whoever asked may go: what is begun is ended.
        return await asyncio.shield(self._leaving[name])

    def _part_with(self, session: Session, name: str) -> tuple[Slab, int]:
        slab = self.slabs.get(name)
        holders = [lease.session for lease in self.leases.on_slab(name) if lease.session != session.name]
        if holders:
            raise WrongState(f"slab {name} is leased by {', '.join(holders)}", reason="SLAB_LEASED",
                             holders=", ".join(holders))
        for lease in self.leases.on_slab(name):
            self.leases.release(lease.lease_id, session.name)
            self._vault.drop(records.lease_name(lease.lease_id))
        self.fence.forget_slab(name)
        actor = self.actors.forget_slab(name)
        if actor is not None:
            self._vault.drop(records.actor_name(actor.run))
        self.ledger.remove(slab)
        return self.slabs.part_with(name)

    async def _free(self, slab: Slab, fd: int) -> int:
        """Ours is the last descriptor, since the keeper has closed its own; closing it takes a second for some ten GiB, in which
        the loop is free."""
        try:
            await self._vault.forget(records.slab_name(slab.name))
            crash_point("broker.slab.deleted")
        finally:
            await asyncio.to_thread(os.close, fd)
            self.slabs.freed(slab)
        return slab.size_bytes

    async def acquire(self, secret: str, name: str, mode: LeaseMode, snapshot: int | None,
                      update_epoch: int | None) -> tuple[Lease, str, Slab]:
        """Grants a lease and returns it with the ticket for its descriptor. Raises Aborted naming conflicting holders."""
        self.expire_tickets()
        lease, slab = await self.grants.acquire(secret, name, mode, snapshot, update_epoch)
        crash_point("broker.lease.granted")
        return lease, self.tickets.issue(Purpose.REDEEM, lease.lease_id, lease.session, self._clock()), slab

    def redeem(self, session: Session, ticket: str) -> tuple[Lease, Slab, int]:
        """The lease, its slab and a descriptor that the caller sends and closes; read-only for READ."""
        lease_id = self.tickets.redeem(ticket, Purpose.REDEEM, session.name, self._clock()).subject
        lease = self.leases.by_id.get(lease_id)
        if lease is None:
            raise NotFound(f"lease {lease_id} was released before its ticket was redeemed", reason="LEASE_NOT_FOUND")
        slab = self.slabs.get(lease.slab)
        handle = self.slabs.open_for(slab.name, writable=lease.mode is LeaseMode.WRITE)
        # Not when it was granted: until its ticket is redeemed, it may still be taken back.
        self.fence.supersede(session.pid, slab.name)
        crash_point("broker.lease.redeemed")
        return lease, slab, handle

    def release(self, secret: str, lease_id: str) -> None:
        """Drops a lease: its holder maps the slab no more. Idempotent."""
        session = self.sessions.get(secret)
        if self.leases.release(lease_id, session.name) or self.fence.release(lease_id, session.pid):
            self._vault.drop(records.lease_name(lease_id))
            crash_point("broker.lease.released")

    def get_snapshot(self, run: str) -> SnapshotInfo:
        actor = self.actors.get(run)
        state = actor.snapshot
        return SnapshotInfo(state.state.value, state.number, 0 if state.readable else state.update_epoch, actor.slabs)

    async def read_devices(self) -> dict[str, Reading]:
        """What the driver says of the devices in use, off the loop: it may be slow, and fences and leases are not."""
        return await asyncio.to_thread(self.budget.read, tuple(self.ledger.hbm_bytes()))

    def enter_phase(self, run: str, iteration: int, phase: Phase, planned: Sequence[PlannedBytes] = (),
                    relaxed: tuple[str, ...] = (), readings: Mapping[str, Reading] | None = None, order: tuple[str, int] = ("", 0)
                    ) -> tuple[str, ...]:
        """Ends a phase and begins another; the violations of the one that ended. Raises OutOfMemory, and changes nothing, when
        a device has no room for what the phase that begins is planned to need. `readings`: what `read_devices` gave.
        `order`: caller and sequence of EnterPhaseRequest."""
        if order[0] and order[0] == self._phase_order[0] and order[1] < self._phase_order[1]:
            return self.ledger.violations
        if not self.ledger.is_at(run, iteration, phase):
            held = self.ledger.hbm_bytes()
            self.budget.check_phase(phase, held, planned)
            readings = self.budget.read(held) if readings is None else readings
            self.ledger.note_unexplained(self.budget.unexplained(held, readings))
            ours = {session.pid for session in self.sessions.by_secret.values()}
            growth = self.budget.check_growth(run or self.ledger.run, self.ledger.phase, held, readings, ours)
            violations = self.ledger.enter(run, iteration, phase, relaxed, growth)
        else:
            violations = self.ledger.enter(run, iteration, phase)
        self._phase_order = order
        self._vault.note(*records.phase(self.ledger))
        crash_point("broker.phase.entered")
        return violations

    def report(self, secret: str, entries: tuple[ResidencyEntry, ...]) -> None:
        """What a session holds outside slabs, in place of its last report."""
        for entry in entries:
            if entry.residency not in set(Residency) or entry.size_bytes < 0:
                raise BadInput(f"{entry.object_class}: {entry.size_bytes} bytes {entry.residency!r} is no residency entry",
                               reason="BAD_RESIDENCY")
        self.ledger.report(self.sessions.get(secret).name, entries)

    def get_ledger(self, run: str) -> Ledger:
        counts = {"slabs": len(self.slabs.by_name), "leases": len(self.leases.by_id), "tickets": len(self.tickets.claims),
                  "sessions": len(self.sessions.by_secret), "former_sessions": len(self.sessions.former)}
        return Ledger(self.ledger.rows(run), self.ledger.peak_rows(run), self.host_limit_bytes, self.slabs.host_bytes, counts)

    def records(self) -> list[Record]:
        """Everything that a successor needs."""
        return records.everything(self.slabs, self.sessions, self.leases, self.actors, self.ledger)

    def restore(self, kept: Iterable[Record]) -> dict[str, str]:
        """Takes over from a dead broker, before anyone is served. Owns the descriptors. Returns the records that were
        left out, with the reasons."""
        restored = records.Restored(self.slabs, self.actors, self.ledger)
        for record in sorted(kept, key=records.rank):
            restored.take(record)
        for name in restored.refused:
            self._vault.drop(name)
        for session, leases in restored.sessions():
            self.sessions.leaving(session, leases, inherited=True)
            if not leases:
                self.sessions.former.remove(session)
                self.forget(session, ())
        self.sessions.serial = restored.serial
        self.fence.start_grace()
        self.fence.bury_dead()
        crash_point("broker.restored")
        return restored.refused

    def close(self) -> None:
        self.slabs.close()
        for session in [*self.sessions.by_secret.values(), *self.sessions.former]:
            os.close(session.pidfd)

    def expire_tickets(self) -> None:
        """Takes back what was never claimed; before any decision about leases. Nobody has the descriptor of a lease whose
        ticket is open: its answer was lost, and its holder does not know of it."""
        for claim in self.tickets.expire(self._clock()):
            if claim.purpose is Purpose.DEPOSIT:
                self.slabs.retract(claim.subject)
            elif self.leases.release(claim.subject, claim.session):
                self._vault.drop(records.lease_name(claim.subject))
