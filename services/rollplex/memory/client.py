"""The broker's client: sessions and leases of an engine. Synchronous, thread-safe, reconnects by itself; README.md has
the API."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rollplex.core.errors import AlreadyExists, BadInput, NotFound, OutOfMemory, RollplexError, Unavailable
from rollplex.core.ids import new_id
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.core.topology import is_host
from rollplex.core.work import ResidencyEntry
from rollplex.memory.drivers import driver_of
from rollplex.memory.handle_connection import HandleConnection
from rollplex.memory.lease import SlabLease
from rollplex.memory.slab import Ledger, LedgerRow, Slab, SnapshotInfo, table
from rollplex.rpc.channel import sync_channel
from rollplex.rpc.convert import from_proto, to_proto
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import memory_broker_service_pb2 as pb
from rollplex.v1 import memory_broker_service_pb2_grpc as pb_grpc
from rollplex.v1 import types_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")
_LOST = ("HANDLE_SOCKET_DOWN", "SESSION_NOT_FOUND")
"""Reasons that a new connection may cure."""
_AWAY = ("UNAVAILABLE", "DRAINING", "RECONNECT_GRACE")
"""Reasons that go with time: gRPC's own, of a broker that is down; a broker's last; a restarted one's, which waits for others."""
FREEING_S = 120.0
"""In which the pages of a deleted slab are free: a broker needs a second for some ten GiB."""
_RETRY_S = 1.0
"""Between attempts of the watching thread after a refusal."""


class BrokerSession:
    """A process's connection to the broker. Made by `connect`; `close` ends it."""

    def __init__(self, address: str, handle_socket: Path, process: str, role: str, timeout_s: float) -> None:
        self.process, self.role = process, role
        self.generation = 0
        """Connections so far."""
        self._address, self._handle_socket, self._timeout_s = address, handle_socket, timeout_s
        self._channel = sync_channel(address)
        self._stub = pb_grpc.MemoryBrokerServiceStub(self._channel)
        self._connecting = threading.Lock()
        self._connection: HandleConnection | None = None
        self._taken_up = False
        """The broker of this connection knows all that its predecessor knew of this process."""
        self._leases: dict[str, SlabLease] = {}
        self._caller, self._phases = new_id("caller"), itertools.count(1)
        """Of phases that are declared here: one that comes late is known by its number."""
        self._report: tuple[ResidencyEntry, ...] | None = None
        self._closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name=f"{process}-broker-watch", daemon=True)

    @classmethod
    def connect(cls, address: str, handle_socket: Path, *, process: str, role: str,
                timeout_s: float = 10.0) -> BrokerSession:
        """Waits up to `timeout_s` for a broker. Raises Unavailable without one, Aborted (PROCESS_NAME_IN_USE) while
        another live process has the name."""
        session = cls(address, handle_socket, process, role, timeout_s)
        try:
            session._call(lambda connection: None)
        except BaseException:
            session.close()
            raise
        session._watcher.start()
        return session

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
                ticket = self._rpc(self._stub.CreateSlab, request).deposit_ticket
                return connection.deposit(ticket, memory())
            except AlreadyExists:
                # A first attempt may have succeeded and its answer been lost with the connection.
                kept = next((found for found in self.list_slabs(name) if found.name == name), None)
                if kept is None and attempts > 1:
                    raise Unavailable(f"slab {name} is still on its way to the keeper") from None
                if kept is None or attempts == 1 or not self._is_ours(kept, slab, memory()):
                    raise
                return kept

        return self._call(work)

    def lease(self, slab: str, mode: LeaseMode, *, snapshot: int | None = None,
              update_epoch: int | None = None) -> SlabLease:
        """Raises Aborted (LEASE_CONFLICT) naming the holders; WrongState for an actor's wrong snapshot or epoch."""
        wire_mode = pb.LEASE_MODE_READ if mode is LeaseMode.READ else pb.LEASE_MODE_WRITE

        def work(connection: HandleConnection) -> SlabLease:
            request = pb.AcquireLeaseRequest(session=connection.session, slab=slab, mode=wire_mode, snapshot=snapshot,
                                             update_epoch=update_epoch)
            granted = self._rpc(self._stub.AcquireLease, request)
            found, fd = connection.redeem(granted.ticket)
            lease = SlabLease(granted.lease_id, mode, found, fd, self._release)
            with self._connecting:
                if self._connection is not connection:
                    # The reconnect did not know of this lease and has given it back.
                    os.close(fd)
                    raise Unavailable("the connection was lost", reason="HANDLE_SOCKET_DOWN")
                self._leases[lease.lease_id] = lease
            return lease

        return self._call(work)

    def list_slabs(self, prefix: str = "") -> tuple[Slab, ...]:
        answer = self._ask(self._stub.ListSlabs, lambda _: pb.ListSlabsRequest(name_prefix=prefix))
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
                return self._rpc(self._stub.DeleteSlab, request, self._timeout_s + FREEING_S).size_bytes
            except NotFound as error:
                # The first attempt's answer was lost with the connection.
                if attempts > 1 and error.reason == "SLAB_NOT_FOUND":
                    return 0
                raise

        return self._call(work)

    def register_snapshot(self, run: str, slabs: Sequence[str], snapshot: int) -> None:
        """Declares the slabs to be the run's actor, VALID at `snapshot`. Idempotent."""
        self._ask(self._stub.RegisterSnapshot,
                  lambda _: pb.RegisterSnapshotRequest(run=run, slabs=slabs, snapshot=snapshot))

    def begin_update(self, run: str, snapshot: int, writers: Sequence[str]) -> int:
        """The update epoch. Raises Aborted (READERS_REMAIN) naming who still leases the actor besides the writers."""
        answer = self._ask(self._stub.BeginUpdate,
                           lambda _: pb.BeginUpdateRequest(run=run, snapshot=snapshot, writers=writers))
        return answer.update_epoch

    def publish_snapshot(self, run: str, update_epoch: int, snapshot: int) -> None:
        """Makes k + 1 readable. Idempotent. Raises Aborted (WRITERS_REMAIN) while a WRITE lease lives."""
        self._ask(self._stub.PublishSnapshot,
                  lambda _: pb.PublishSnapshotRequest(run=run, update_epoch=update_epoch, snapshot=snapshot))

    def get_snapshot(self, run: str) -> SnapshotInfo:
        """Raises NotFound before registration."""
        return from_proto(SnapshotInfo, self._ask(self._stub.GetSnapshot, lambda _: pb.GetSnapshotRequest(run=run)))

    def enter_phase(self, run: str, iteration: int, phase: Phase, planned: Sequence[PlannedBytes] = (),
                    relaxed: Sequence[str] = ()) -> tuple[str, ...]:
        """What violated the residency contract when the last phase ended; empty when it held.

        `planned` is what the phase that begins needs, `relaxed` the classes whose row does not hold in it. Raises OutOfMemory
        (PHASE_OVER_BUDGET), with the table, when a device has no room for that; the phase is not entered then.
        """
        wire_phase = types_pb2.Phase.Value(f"PHASE_{phase.value.upper()}")
        needs = [to_proto(item, pb.PlannedBytes) for item in planned]
        sequence = next(self._phases)
        answer = self._ask(self._stub.EnterPhase, lambda _: pb.EnterPhaseRequest(
            run=run, iteration=iteration, phase=wire_phase, planned=needs, relaxed=relaxed, caller=self._caller,
            sequence=sequence))
        return tuple(answer.violations)

    def report_residency(self, entries: Sequence[ResidencyEntry]) -> None:
        """What this process holds outside slabs, in place of its last report. Repeated to a restarted broker."""
        before, self._report = self._report, tuple(entries)
        try:
            self._call(self._send_report)
        except BadInput:
            # Repeated to the next broker, it would be refused again, and with it every call.
            self._report = before
            raise

    def ledger(self, run: str = "") -> Ledger:
        answer = self._ask(self._stub.GetLedger, lambda _: pb.GetLedgerRequest(run=run))
        rows, peaks = ([from_proto(LedgerRow, row) for row in part] for part in (answer.rows, answer.peaks))
        return Ledger(tuple(rows), tuple(peaks), answer.host_limit_bytes, answer.host_slab_bytes,
                      dict(answer.counts))

    def close(self) -> None:
        """Says that nothing is mapped any more and ends the session with its leases. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake_write, b"x")
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            # Not for a while only: it waits for descriptors that are closed below.
            self._watcher.join()
        with self._connecting:
            if self._connection is not None:
                self._connection.say_bye()
                self._connection.close()
        for lease in list(self._leases.values()):
            lease.release()
        self._channel.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

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

    def _ask(self, method: Callable[..., Any], request: Callable[[str], Any]) -> Any:
        """One RPC whose request is made from the session's secret."""
        return self._call(lambda connection: self._rpc(method, request(connection.session)))

    def _rpc(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            # A stopped broker: its socket takes the request in, and nobody reads it.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(f"the broker: no answer within {timeout_s:g} s", reason="BROKER_SILENT") from error
            raise error_from_rpc(error) from error

    def _call(self, work: Callable[[HandleConnection], T], failed: HandleConnection | None = None) -> T:
        """`work` with a live connection, not `failed`; done again as long as the broker is away and time is left."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._closed:
                raise _closed()
            connection = failed
            try:
                connection = self._connected(failed)
                return work(connection)
            except RollplexError as error:
                if error.reason not in (*_LOST, *_AWAY) or time.monotonic() > deadline:
                    raise
                failed = connection if error.reason in _LOST else None
            # Nothing announces a broker that is back; the deadline bounds this.
            time.sleep(0.02)

    def _connected(self, failed: HandleConnection | None) -> HandleConnection:
        """The connection; a new one in place of `failed`."""
        with self._connecting:
            if self._closed:
                raise _closed()
            if self._connection is None or self._connection is failed:
                self._reconnect()
            if not self._taken_up:
                self._take_up(self._connection)
            return self._connection

    def _reconnect(self) -> None:
        self._drop_connection()
        self._connection = HandleConnection(self._handle_socket, self.process, self.role, self._timeout_s)
        self.generation += 1
        for lease_id, lease in list(self._leases.items()):
            lease.lost = lease_id not in self._connection.resumed

    def _drop_connection(self) -> None:
        """Whoever waits for it returns. Closing it is the watching thread's."""
        if self._connection is not None:
            self._connection.shut()
        self._connection, self._taken_up = None, False

    def _take_up(self, connection: HandleConnection) -> None:
        """After a reconnect: gives back the leases that nobody here knows of, and repeats the report. What fails is done by
        the next call: gRPC may find the new broker later than the handle socket does."""
        try:
            for lease_id in connection.resumed:
                # Granted just before the loss: its answer never came.
                if lease_id not in self._leases:
                    self._rpc(self._stub.ReleaseLease,
                              pb.ReleaseLeaseRequest(session=connection.session, lease_id=lease_id))
            self._send_report(connection)
        except RollplexError as error:
            if error.reason in _LOST:
                self._drop_connection()
            raise
        self._taken_up = True

    def _send_report(self, connection: HandleConnection) -> None:
        if self._report is not None:
            entries = [to_proto(entry, types_pb2.ResidencyEntry) for entry in self._report]
            self._rpc(self._stub.ReportResidency,
                      pb.ReportResidencyRequest(session=connection.session, entries=entries))

    def _release(self, lease: SlabLease) -> None:
        self._leases.pop(lease.lease_id, None)
        if self._closed:
            return
        with contextlib.suppress(NotFound):
            self._ask(self._stub.ReleaseLease,
                      lambda session: pb.ReleaseLeaseRequest(session=session, lease_id=lease.lease_id))

    def _watch(self) -> None:
        """Reconnects as soon as the connection is lost, so that leases live on although nobody calls."""
        lost: HandleConnection | None = None
        woken = select.poll()
        woken.register(self._wake_read, select.POLLIN)
        while not self._closed:
            connection = self._connection
            if connection is None or connection is lost or not self._taken_up:
                try:
                    self._call(lambda _: None, failed=lost)
                except RollplexError as error:
                    log.warning("%s has no broker: %s", self.process, error)
                    woken.poll(_RETRY_S * 1000)
            elif connection.wait_lost(self._wake_read):
                connection.close()
                lost = connection


def _closed() -> Unavailable:
    return Unavailable("the broker session is closed", reason="SESSION_CLOSED")
