"""Bringing the mesh up and down, and asking its services for their health."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.core.errors import BadInput, DeadlineExceeded, RollplexError, Unavailable
from rollplex.core.strict import read_toml
from rollplex.rpc import runtime_dir as owners
from rollplex.rpc.channel import check_address, sync_channel
from rollplex.rpc.credentials import client_side, server_side
from rollplex_client.cli.fit import check_fits
from rollplex_client.cli.mps_control import find_control
from rollplex_client.cli.programs import (
    EFFECTIVE_CONFIG,
    MPS,
    NO_MODULES,
    STOP_MARGIN_S,
    WATCHDOG,
    Program,
    log_path,
    programs,
    write_files,
)
from rollplex_client.cli.settings import Settings, merged
from rollplex_client.cli.supervision import Process, Supervisor, claimed, listener_pid, start

POLL_S = 0.1
"""Supervisor and gRPC health each announce changes in their own way; asking both is simpler than joining the two."""
HEALTH_TIMEOUT_S = 1.0
LOG_LINES = 15

OnHealth = Callable[[dict[str, str]], None]


def prepare_runtime_dir(path: Path) -> None:
    """Creates it with mode 0700. Raises BadInput when it is another user's, open to others, or too long for sockets."""
    check_address(f"unix:{path / 'coordinator.sock'}")
    owners.prepare_runtime_dir(path)


def check_tcp(settings: Settings) -> None:
    """Raises BadInput for a TCP address of the mesh without TLS and token, or with files that cannot be used."""
    for program in programs(settings):
        if program.serves_grpc:
            server_side(settings.mesh.address(program.name))
            client_side(settings.mesh.address(program.name))


def check_ports(settings: Settings) -> None:
    """Raises BadInput for a TCP address of the mesh on which somebody listens already."""
    for program in programs(settings):
        address = settings.mesh.address(program.name)
        if not program.serves_grpc or address.startswith("unix:"):
            continue
        host, _, port = check_address(address).rpartition(":")
        try:
            resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError:
            continue  # the service itself says what is wrong with the name
        for family, kind, _, _, place in resolved:
            with socket.socket(family, kind) as probe:
                # As a server does: connections of an earlier mesh that still fade away are no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(place)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise BadInput(f"{program.name} cannot listen on {address}: the port is in use; end what listens "
                                       "there or choose another in mesh.addresses", reason="ADDRESS_IN_USE",
                                       service=program.name, address=address) from error


def check_sharing(settings: Settings) -> None:
    """Raises BadInput where the policy needs an MPS daemon that cannot be had here."""
    mesh = settings.mesh
    if mesh.policy is not None and mesh.policy.daemon:
        find_control(mesh.sharing)
        # The longest of the sockets that the daemon makes there.
        check_address(f"unix:{mesh.mps_pipe_dir / 'control_privileged'}")


class HealthProbe:
    """Health of the services of one mesh, over channels that stay open."""

    def __init__(self, settings: Settings) -> None:
        self._programs = programs(settings)
        self._channels = {program.name: sync_channel(settings.mesh.address(program.name))
                          for program in self._programs if program.serves_grpc}
        self._sockets = {"keeper": settings.mesh.keeper_socket, MPS: settings.mesh.mps_socket,
                         WATCHDOG: settings.mesh.watchdog_socket}
        """Of what serves no gRPC."""

    def ask(self) -> dict[str, str]:
        """Name -> SERVING, NOT_SERVING or UNREACHABLE. All are asked at once."""
        calls = {name: health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest(),
                                                                        timeout=HEALTH_TIMEOUT_S)
                 for name, channel in self._channels.items()}
        return {program.name: self._answer(program, calls.get(program.name)) for program in self._programs}

    def _answer(self, program: Program, call: grpc.Future | None) -> str:
        if call is None:
            # A dead process leaves its socket's file.
            return "SERVING" if listener_pid(self._sockets[program.name]) else "UNREACHABLE"
        try:
            return health_pb2.HealthCheckResponse.ServingStatus.Name(call.result().status)
        except grpc.RpcError:
            return "UNREACHABLE"

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def bring_up(settings: Settings, *, timeout_s: float, on_health: OnHealth | None = None,
             modules: Mapping[str, str] = NO_MODULES) -> Supervisor:
    """Starts every service and returns when all serve; on failure nothing is left running. `modules`: as write_files.

    Raises OutOfMemory for what cannot fit, BadInput for a directory or port in use and for a checkpoint that cannot be
    served, Unavailable when a service exits (with the end of its log), DeadlineExceeded.
    """
    settings.require_model()
    check_fits(settings.sections)
    check_sharing(settings)
    check_tcp(settings)
    runtime_dir = settings.mesh.runtime_dir
    prepare_runtime_dir(runtime_dir)
    supervisor = Supervisor(runtime_dir)
    with claimed(runtime_dir):
        check_ports(settings)
        start(runtime_dir, write_files(settings, modules))
    try:
        wait_until_serving(settings, supervisor, timeout_s=timeout_s, on_health=on_health)
    except BaseException:
        with contextlib.suppress(RollplexError):
            supervisor.shut_down(stop_timeout_s(settings))
        raise
    return supervisor


def wait_until_serving(settings: Settings, supervisor: Supervisor, *, timeout_s: float,
                       on_health: OnHealth | None = None, only: str | None = None) -> None:
    """Returns when all services (or `only` that one) serve. Raises Unavailable, DeadlineExceeded as `bring_up`."""
    deadline = time.monotonic() + timeout_s
    first_pids: dict[str, int] = {}
    probe = HealthProbe(settings)
    try:
        while True:
            processes = {item.name: item for item in supervisor.processes() if only in (None, item.name)}
            for process in processes.values():
                _raise_if_broken(settings, process, first_pids)
            health = {name: state for name, state in probe.ask().items() if name in processes}
            if on_health is not None:
                on_health(health)
            if all(state == "SERVING" for state in health.values()):
                return
            if time.monotonic() > deadline:
                late = [name for name, state in health.items() if state != "SERVING"]
                raise DeadlineExceeded(f"{', '.join(late)} not serving after {timeout_s:.0f} s; "
                                       + _log_end(settings, late[0]), reason="MESH_NOT_READY")
            time.sleep(POLL_S)
    finally:
        probe.close()


def _raise_if_broken(settings: Settings, process: Process, first_pids: dict[str, int]) -> None:
    pid = first_pids.setdefault(process.name, process.pid) if process.pid else 0
    if process.state in ("BACKOFF", "FATAL", "EXITED", "UNKNOWN") or (process.pid and pid != process.pid):
        raise Unavailable(f"{process.name} ended while it started ({process.error or process.state}); "
                          + _log_end(settings, process.name), reason="SERVICE_FAILED", service=process.name)


def _log_end(settings: Settings, name: str) -> str:
    path = log_path(settings.mesh.runtime_dir, name)
    return f"the end of {path}:\n" + "\n".join(f"    {line}" for line in last_lines(path, LOG_LINES))


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log; none when there is no file yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 500 * count))
            return file.read().decode(errors="replace").splitlines()[-count:] if count else []
    except FileNotFoundError:
        return []


def as_running(settings: Settings) -> Settings:
    """With the ranks and addresses of the mesh in the runtime directory, whatever this command was told."""
    path = settings.mesh.runtime_dir / EFFECTIVE_CONFIG
    if not path.is_file():
        return settings
    running = read_toml(path)
    return merged(settings, {name: running[name] for name in ("mesh", "coordinator") if name in running})


def stop_timeout_s(settings: Settings) -> float:
    """The coordinator drains, then the engines, then the broker."""
    return 3 * (settings.mesh.drain_timeout_s + STOP_MARGIN_S) + 10.0


@contextlib.contextmanager
def mesh_for(settings: Settings, *, timeout_s: float, keep_up: bool, on_health: OnHealth | None = None
             ) -> Iterator[bool]:
    """A mesh for the duration: the one that is up, or one of our own, taken down afterwards unless `keep_up`.

    Yields whether it was started here.
    """
    supervisor = Supervisor(settings.mesh.runtime_dir)
    if supervisor.is_up():
        _check_same_model(settings)
        wait_until_serving(as_running(settings), supervisor, timeout_s=timeout_s, on_health=on_health)
        yield False
        return
    supervisor = bring_up(settings, timeout_s=timeout_s, on_health=on_health)
    try:
        yield True
    finally:
        if not keep_up:
            supervisor.shut_down(stop_timeout_s(settings))


def _check_same_model(settings: Settings) -> None:
    """Raises BadInput when the running mesh holds another model than the one asked for."""
    running = read_toml(settings.mesh.runtime_dir / EFFECTIVE_CONFIG).get("model", {}).get("checkpoint")
    wanted = settings.sections["model"].checkpoint if "model" in settings.sections else None
    if wanted is not None and running is not None and Path(running).resolve() != wanted.resolve():
        raise BadInput(f"the mesh in {settings.mesh.runtime_dir} is up with model {running}, not {wanted}; "
                       "run `rollplex down` first or choose another --runtime-dir", reason="OTHER_MODEL_LOADED")
