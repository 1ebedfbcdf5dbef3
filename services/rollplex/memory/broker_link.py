"""A process's connection to the broker: made again when it is lost, with what the process has there. Thread-safe."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rollplex.core.errors import BadInput, NotFound, RollplexError, Unavailable
from rollplex.core.work import ResidencyEntry
from rollplex.memory.handle_connection import HandleConnection
from rollplex.memory.lease import SlabLease
from rollplex.rpc.channel import sync_channel
from rollplex.rpc.convert import to_proto
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
_RETRY_S = 1.0
"""Between attempts of the watching thread after a refusal."""


class BrokerLink:
    """Calls wait for a broker that is away; leases and report go on with the next one. `start` and `close` are the pair."""

    def __init__(self, address: str, handle_socket: Path, process: str, role: str, timeout_s: float) -> None:
        self.generation = 0
        """Connections so far."""
        self.timeout_s = timeout_s
        self._handle_socket, self._process, self._role = handle_socket, process, role
        self._channel = sync_channel(address)
        self.stub = pb_grpc.MemoryBrokerServiceStub(self._channel)
        self._connecting = threading.Lock()
        self._connection: HandleConnection | None = None
        self._taken_up = False
        """The broker of this connection knows all that its predecessor knew of this process."""
        self._leases: dict[str, SlabLease] = {}
        self._report: tuple[ResidencyEntry, ...] | None = None
        self._closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name=f"{process}-broker-watch", daemon=True)

    def start(self) -> None:
        """Connects, and watches the connection from then on. After a failure, `close`."""
        self.call(lambda connection: None)
        self._watcher.start()

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

    # Calls

    def call(self, work: Callable[[HandleConnection], T], failed: HandleConnection | None = None) -> T:
        """`work` with a live connection, not `failed`; done again as long as the broker is away and time is left. The time that a
        broker worked for us, before it was lost, is not time that it was away."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            if self._closed:
                raise _closed()
            connection, began_s = failed, None
            try:
                connection = self._connected(failed)
                began_s = time.monotonic()
                return work(connection)
            except RollplexError as error:
                if began_s is not None:
                    deadline += time.monotonic() - began_s
                if error.reason not in (*_LOST, *_AWAY) or time.monotonic() > deadline:
                    raise
                failed = connection if error.reason in _LOST else None
            # Nothing announces a broker that is back; the deadline bounds this.
            time.sleep(0.02)

    def ask(self, method: Callable[..., Any], request: Callable[[str], Any]) -> Any:
        """One RPC whose request is made from the session's secret."""
        return self.call(lambda connection: self.rpc(method, request(connection.session)))

    def rpc(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt, within `call`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            # A stopped broker: its socket takes the request in, and nobody reads it.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(f"the broker: no answer within {timeout_s:g} s", reason="BROKER_SILENT") from error
            raise error_from_rpc(error) from error

    # What the process has at the broker, whichever broker that is

    def hold(self, connection: HandleConnection, lease: SlabLease) -> None:
        """Keeps a lease that was granted over `connection`, until `release`."""
        with self._connecting:
            if self._connection is not connection:
                # The reconnect did not know of this lease and has given it back.
                os.close(lease.fd)
                raise Unavailable("the connection was lost", reason="HANDLE_SOCKET_DOWN")
            self._leases[lease.lease_id] = lease

    def release(self, lease: SlabLease) -> None:
        self._leases.pop(lease.lease_id, None)
        if self._closed:
            return
        with contextlib.suppress(NotFound):
            self.ask(self.stub.ReleaseLease,
                     lambda session: pb.ReleaseLeaseRequest(session=session, lease_id=lease.lease_id))

    def report(self, entries: Sequence[ResidencyEntry]) -> None:
        """In place of the last report."""
        before, self._report = self._report, tuple(entries)
        try:
            self.call(self._send_report)
        except BadInput:
            # Repeated to the next broker, it would be refused again, and with it every call.
            self._report = before
            raise

    def _send_report(self, connection: HandleConnection) -> None:
        if self._report is not None:
            entries = [to_proto(entry, types_pb2.ResidencyEntry) for entry in self._report]
            self.rpc(self.stub.ReportResidency,
                     pb.ReportResidencyRequest(session=connection.session, entries=entries))

    # The connection

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
        self._connection = HandleConnection(self._handle_socket, self._process, self._role, self.timeout_s)
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
                    self.rpc(self.stub.ReleaseLease,
                             pb.ReleaseLeaseRequest(session=connection.session, lease_id=lease_id))
            self._send_report(connection)
        except RollplexError as error:
            if error.reason in _LOST:
                self._drop_connection()
            raise
        self._taken_up = True

    def _watch(self) -> None:
        """Reconnects as soon as the connection is lost, so that leases live on although nobody calls."""
        lost: HandleConnection | None = None
        woken = select.poll()
        woken.register(self._wake_read, select.POLLIN)
        while not self._closed:
            connection = self._connection
            if connection is None or connection is lost or not self._taken_up:
                try:
                    self.call(lambda _: None, failed=lost)
                except RollplexError as error:
                    log.warning("%s has no broker: %s", self._process, error)
                    woken.poll(_RETRY_S * 1000)
            elif connection.wait_lost(self._wake_read):
                connection.close()
                lost = connection


def _closed() -> Unavailable:
    return Unavailable("the broker session is closed", reason="SESSION_CLOSED")
