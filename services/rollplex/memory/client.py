"""The broker's client: what a process asks of it. Synchronous, thread-safe; README.md has the API."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rollplex.core.errors import AlreadyExists, NotFound, OutOfMemory, Unavailable
from rollplex.core.ids import new_id
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.core.topology import is_host
from rollplex.core.work import ResidencyEntry
from rollplex.memory.broker_link import BrokerLink
from rollplex.memory.drivers import driver_of
from rollplex.memory.handle_connection import HandleConnection
from rollplex.memory.lease import SlabLease
from rollplex.memory.slab import Ledger, LedgerRow, Slab, SnapshotInfo, table
from rollplex.rpc.convert import from_proto, to_proto
from rollplex.v1 import memory_broker_service_pb2 as pb
from rollplex.v1 import types_pb2

FREEING_S = 120.0
"""In which the pages of a deleted slab are free: a broker needs a second for some ten GiB."""


class BrokerSession:
    """A process's session at the broker, over a `BrokerLink`. Made by `connect`; `close` ends it."""

    def __init__(self, address: str, handle_socket: Path, process: str, role: str, timeout_s: float) -> None:
        self.process, self.role = process, role
        self._link = BrokerLink(address, handle_socket, process, role, timeout_s)
        self._stub = self._link.stub
        self._caller, self._phases = new_id("caller"), itertools.count(1)
        """Of phases that are declared here: one that comes late is known by its number."""

    @classmethod
    def connect(cls, address: str, handle_socket: Path, *, process: str, role: str,
                timeout_s: float = 10.0) -> BrokerSession:
        """Waits up to `timeout_s` for a broker. Raises Unavailable without one, Aborted (PROCESS_NAME_IN_USE) while
        another live process has the name."""
        session = cls(address, handle_socket, process, role, timeout_s)
        try:
            session._link.start()
        except BaseException:
            session.close()
            raise
        return session

    @property
    def generation(self) -> int:
        """Connections so far."""
        return self._link.generation

    def create(self, name: str, *, object_class: str, device: str = "host", size_bytes: int, run: str = "") -> Slab:
        """A new zero-filled slab in the broker's custody. Raises AlreadyExists, or OutOfMemory with the ledger's table."""
        driver = driver_of(device)
        with contextlib.ExitStack() as made:
            def make() -> int:
                try:
                    handle = driver.create(size_bytes, name)
                except OSError as error:
                    if error.errno != errno.ENOMEM:
                        raise
                    raise OutOfMemory(
                        f"{device} has no room for the {size_bytes:,} bytes of slab {name}, though the broker's budget has: "
                        f"{error}. Something holds memory that the ledger does not count\n{table(self.ledger().rows)}",
                        reason="OUT_OF_DEVICE_MEMORY", device=device, size_bytes=size_bytes) from error
                made.callback(driver.release, handle)
                fd = driver.export(handle)
                made.callback(os.close, fd)
                return fd

            return self._deposit(pb.Slab(name=name, object_class=object_class, role=self.role, device=device,
                                         size_bytes=size_bytes, run=run), functools.cache(make))

    def deposit(self, name: str, fd: int, *, object_class: str, device: str = "host", run: str = "",
                size_bytes: int | None = None) -> Slab:
        """Gives memory made elsewhere into custody; `fd` stays the caller's: a memfd sealed against resizing, or what the CUDA
        driver exported, whose size must be said."""
        size = os.fstat(fd).st_size if size_bytes is None else size_bytes
        return self._deposit(pb.Slab(name=name, object_class=object_class, role=self.role, device=device, size_bytes=size,
                                     run=run), lambda: fd)

    def _deposit(self, slab: pb.Slab, memory: Callable[[], int]) -> Slab:
        """`memory` gives the descriptor; asked for once the broker has found room, so that it never takes what is not there."""
        name, attempts = slab.name, 0

        def work(connection: HandleConnection) -> Slab:
            nonlocal attempts
            attempts += 1
            request = pb.CreateSlabRequest(session=connection.session, slab=slab)
            try:
                ticket = self._link.rpc(self._stub.CreateSlab, request).deposit_ticket
                return connection.deposit(ticket, memory())
            except AlreadyExists:
                # A first attempt may have succeeded and its answer been lost with the connection.
                kept = next((found for found in self.list_slabs(name) if found.name == name), None)
                if kept is None and attempts > 1:
                    raise Unavailable(f"slab {name} is still on its way to the keeper") from None
                if kept is None or attempts == 1 or not self._is_ours(kept, slab, memory()):
                    raise
                return kept

        return self._link.call(work)

    def lease(self, slab: str, mode: LeaseMode, *, snapshot: int | None = None,
              update_epoch: int | None = None) -> SlabLease:
        """Raises Aborted (LEASE_CONFLICT) naming the holders; WrongState for an actor's wrong snapshot or epoch."""
        wire_mode = pb.LEASE_MODE_READ if mode is LeaseMode.READ else pb.LEASE_MODE_WRITE

        def work(connection: HandleConnection) -> SlabLease:
            request = pb.AcquireLeaseRequest(session=connection.session, slab=slab, mode=wire_mode, snapshot=snapshot,
                                             update_epoch=update_epoch)
            granted = self._link.rpc(self._stub.AcquireLease, request)
            found, fd = connection.redeem(granted.ticket)
            lease = SlabLease(granted.lease_id, mode, found, fd, self._link.release)
            self._link.hold(connection, lease)
            return lease

        return self._link.call(work)

    def list_slabs(self, prefix: str = "") -> tuple[Slab, ...]:
        answer = self._link.ask(self._stub.ListSlabs, lambda _: pb.ListSlabsRequest(name_prefix=prefix))
        return tuple(from_proto(Slab, slab) for slab in answer.slabs)

    def delete(self, name: str) -> int:
        """Bytes given back, free by then (0 when only a lost first attempt knew). Raises WrongState (SLAB_LEASED) while others
        lease it."""
        attempts = 0

        def work(connection: HandleConnection) -> int:
            nonlocal attempts
            attempts += 1
            try:
                request = pb.DeleteSlabRequest(session=connection.session, name=name)
                return self._link.rpc(self._stub.DeleteSlab, request, self._link.timeout_s + FREEING_S).size_bytes
            except NotFound as error:
                # The first attempt's answer was lost with the connection.
                if attempts > 1 and error.reason == "SLAB_NOT_FOUND":
                    return 0
                raise

        return self._link.call(work)

    def register_snapshot(self, run: str, slabs: Sequence[str], snapshot: int) -> None:
        """Declares the slabs to be the run's actor, VALID at `snapshot`. Idempotent."""
        self._link.ask(self._stub.RegisterSnapshot,
                       lambda _: pb.RegisterSnapshotRequest(run=run, slabs=slabs, snapshot=snapshot))

    def begin_update(self, run: str, snapshot: int, writers: Sequence[str]) -> int:
        """The update epoch. Raises Aborted (READERS_REMAIN) naming who still leases the actor besides the writers."""
        answer = self._link.ask(self._stub.BeginUpdate,
                                lambda _: pb.BeginUpdateRequest(run=run, snapshot=snapshot, writers=writers))
        return answer.update_epoch

    def publish_snapshot(self, run: str, update_epoch: int, snapshot: int) -> None:
        """Makes k + 1 readable. Idempotent. Raises Aborted (WRITERS_REMAIN) while a WRITE lease lives."""
        self._link.ask(self._stub.PublishSnapshot,
                       lambda _: pb.PublishSnapshotRequest(run=run, update_epoch=update_epoch, snapshot=snapshot))

    def get_snapshot(self, run: str) -> SnapshotInfo:
        """Raises NotFound before registration."""
        return from_proto(SnapshotInfo, self._link.ask(self._stub.GetSnapshot, lambda _: pb.GetSnapshotRequest(run=run)))

    def enter_phase(self, run: str, iteration: int, phase: Phase, planned: Sequence[PlannedBytes] = (),
                    relaxed: Sequence[str] = ()) -> tuple[str, ...]:
        """What violated the residency contract when the last phase ended; empty when it held.

        `planned` is what the phase that begins needs, `relaxed` the classes whose row does not hold in it. Raises OutOfMemory
        (PHASE_OVER_BUDGET), with the table, when a device has no room for that; the phase is not entered then.
        """
        wire_phase = types_pb2.Phase.Value(f"PHASE_{phase.value.upper()}")
        needs = [to_proto(item, pb.PlannedBytes) for item in planned]
        sequence = next(self._phases)
        answer = self._link.ask(self._stub.EnterPhase, lambda _: pb.EnterPhaseRequest(
            run=run, iteration=iteration, phase=wire_phase, planned=needs, relaxed=relaxed, caller=self._caller,
            sequence=sequence))
        return tuple(answer.violations)

    def report_residency(self, entries: Sequence[ResidencyEntry]) -> None:
        """What this process holds outside slabs, in place of its last report. Repeated to a restarted broker."""
        self._link.report(entries)

    def ledger(self, run: str = "") -> Ledger:
        answer = self._link.ask(self._stub.GetLedger, lambda _: pb.GetLedgerRequest(run=run))
        rows, peaks = ([from_proto(LedgerRow, row) for row in part] for part in (answer.rows, answer.peaks))
        return Ledger(tuple(rows), tuple(peaks), answer.host_limit_bytes, answer.host_slab_bytes,
                      dict(answer.counts))

    def close(self) -> None:
        """Says that nothing is mapped any more and ends the session with its leases. Idempotent."""
        self._link.close()

    def __enter__(self) -> BrokerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_ours(self, kept: Slab, announced: pb.Slab, fd: int) -> bool:
        """Whether a slab at the broker is what this process deposited a moment ago."""
        if is_host(kept.device):
            return kept.inode == os.fstat(fd).st_ino
        # A GPU's descriptors have no identity; a name is this role's own.
        return (kept.role, kept.device, kept.size_bytes) == (announced.role, announced.device, announced.size_bytes)
