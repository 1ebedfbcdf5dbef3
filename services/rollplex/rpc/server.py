"""Serving: bind, health, reflection, SIGTERM drain. Every service of the mesh comes through `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import uvloop
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollplex.core.compatibility import Facts
from rollplex.core.errors import BadInput, InternalError
from rollplex.rpc.channel import OPTIONS, check_address
from rollplex.rpc.credentials import server_side
from rollplex.rpc.describe import DescribeServicer
from rollplex.rpc.interceptors import Gate
from rollplex.rpc.runtime_dir import prepare_runtime_dir
from rollplex.v1 import describe_service_pb2_grpc

log = logging.getLogger(__name__)

AddServicers = Callable[[aio.Server], list[str]]
"""Adds servicers to a server and returns their full service names."""


class RunningServer:
    """A bound server; `ready` turns health to SERVING, `drain` ends it."""

    def __init__(self, server: aio.Server, gate: Gate, health_servicer: health.aio.HealthServicer,
                 service_names: list[str], address: str) -> None:
        self.address = address
        self._server, self._gate, self._health, self._names = server, gate, health_servicer, service_names

    async def ready(self) -> None:
        """Calls are answered from here on."""
        self._gate.loading = False
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new calls, gives running ones `timeout_s` and removes the socket."""
        self._gate.draining = True
        await self._health.enter_graceful_shutdown()
        await self._server.stop(timeout_s)
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)


def claim_unix_socket(path: Path) -> None:
    """Removes a socket file that nobody listens on. Raises BadInput when somebody does."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise BadInput(f"{path} is in use by a running service; stop it or choose another runtime directory",
                   reason="ADDRESS_IN_USE", address=path)


async def start_server(name: str, address: str, add_servicers: AddServicers,
                       subjects: Mapping[str, Facts] | None = None) -> RunningServer:
    """Binds and starts a server that answers UNAVAILABLE, and NOT_SERVING to health, until `ready`.

    `subjects`: what the service says of itself beside its protos (`rpc.describe`). Raises BadInput for an address in use, and
    for TCP without TLS and token.
    """
    credentials = server_side(check_address(address))
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        prepare_runtime_dir(path.parent)
        claim_unix_socket(path)
    gate = Gate(None if credentials is None else credentials[1])
    server = aio.server(interceptors=[gate], options=[*OPTIONS, ("grpc.so_reuseport", 0)])
    names = add_servicers(server)
    describe_service_pb2_grpc.add_DescribeServiceServicer_to_server(DescribeServicer(name, subjects or {}), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    for service in ["", *names]:
        await health_servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials[0])
    except RuntimeError as error:
        raise BadInput(f"{name} cannot listen on {address}: {error}", reason="ADDRESS_IN_USE",
                       address=address) from error
    if port == 0:
        raise InternalError(f"{name}: gRPC gave no port for {address}")
    if not address.startswith("unix:") and address.endswith(":0"):
        address = f"{address.rpartition(':')[0]}:{port}"
    await server.start()
    if address.startswith("unix:"):
        path.chmod(0o600)
    return RunningServer(server, gate, health_servicer, names, address)


async def serve(name: str, address: str, add_servicers: AddServicers, *, drain_timeout_s: float = 10.0,
                subjects: Mapping[str, Facts] | None = None,
                on_ready: Callable[[], Awaitable[None]] | None = None,
                on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `on_ready` runs before health says SERVING, `on_drain` last."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    running = await start_server(name, address, add_servicers, subjects)
    try:
        if on_ready is not None:
            await on_ready()
        await running.ready()
        log.info("%s serves on %s", name, running.address)
        await stopping.wait()
        log.info("%s drains", name)
    finally:
        await running.drain(drain_timeout_s)
        if on_drain is not None:
            await on_drain()
    log.info("%s has stopped", name)


def run(main: Awaitable[None]) -> None:
    """Runs a service's main coroutine on uvloop."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main)


def configure_logging(name: str) -> None:
    """One line an event, on stderr: time, service, level, message."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")
