"""`python -m rollplex_client.cli.mps_service`: the mesh's MPS daemon as one of its supervised processes.

It listens on mps.sock. Engines connect before they touch CUDA, get one byte when they may, and hold the connection: when a
server of the daemon faults or is gone, every client's context is lost, so all connections are closed, each engine ends at
once, and the supervisor starts them anew. That is the planned restart of all roles of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.entry import load_sections, run_service
from rollplex.core.errors import Unavailable, WrongState
from rollplex.rpc.handles import listen
from rollplex_client.cli.mps_control import CONTROL, ControlDaemon, find_control

log = logging.getLogger("mps")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
"""Of each of: quit, terminate, kill. Engines stop first, so there is nothing to wait for."""
CHECK_S = 1.0
"""Between looks at the servers: the control daemon announces nothing."""
READY = b"+"


class _Stop(BaseException):
    """SIGTERM."""


class MpsService:
    """`run` ends by SIGTERM, or by Unavailable when the daemon dies."""

    def __init__(self, daemon: ControlDaemon, socket_path: Path, *, check_s: float = CHECK_S) -> None:
        self._daemon, self._check_s = daemon, check_s
        self._path = socket_path
        self._known: set[int] = set()
        self._broken = False
        self._waiting: list[socket.socket] = []
        self._links: list[socket.socket] = []

    def run(self) -> None:
        """Raises Unavailable."""
        try:
            self._daemon.start(START_TIMEOUT_S)
            self._daemon.start_server(START_TIMEOUT_S)
            self._look()
            with listen(self._path) as listener, _pidfd(self._daemon.pid) as died:
                log.info("serving: daemon %d", self._daemon.pid)
                self._watch(listener, died)
        finally:
            # A second SIGTERM must not leave the daemon behind.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # Engines hear of it first: what they launch from now on fails.
            self._drop()
            self._path.unlink(missing_ok=True)
            self._daemon.stop(STOP_TIMEOUT_S, self._known)

    def _watch(self, listener: socket.socket, died: int) -> None:
        while True:
            ready, _, _ = select.select([listener, died, *self._links, *self._waiting], [], [], self._check_s)
            if died in ready:
                raise Unavailable(f"{CONTROL} ended with status {self._daemon.exit_status}", reason="MPS_DOWN")
            if listener in ready:
                self._waiting.append(listener.accept()[0])
            # Engines say nothing: what can be read is an end.
            self._links = _without_ended(self._links, ready)
            self._waiting = _without_ended(self._waiting, ready)
            self._look()

    def _look(self) -> None:
        """At the servers; admits who waits while all is well."""
        try:
            servers = self._daemon.servers()
        except Unavailable as error:
            log.warning("%s", error)
            return
        gone = self._known - set(servers)
        faulty = [pid for pid, status in servers.items() if status == "FAULT"]
        was_broken, self._broken, self._known = self._broken, bool(gone or faulty), set(servers)
        if self._broken and not was_broken:
            log.error("server %s; all %d engines restart", f"{faulty[0]} has a fault" if faulty else f"{min(gone)} is gone",
                      len(self._links))
            self._drop()
        if not self._broken:
            self._admit()

    def _admit(self) -> None:
        for link in self._waiting:
            try:
                link.send(READY, socket.MSG_NOSIGNAL)
                self._links.append(link)
            except OSError:
                link.close()
        self._waiting = []

    def _drop(self) -> None:
        for link in self._links:
            link.close()
        self._links = []


def _without_ended(links: list[socket.socket], readable: list[object]) -> list[socket.socket]:
    for link in links:
        if link in readable:
            link.close()
    return [link for link in links if link.fileno() >= 0]


@contextlib.contextmanager
def _pidfd(pid: int):
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollplex_client.cli.mps_service", description="The mesh's MPS daemon.")
    parser.add_argument("--config", type=Path, help="the mesh's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides", help="override a key")
    parsed = parser.parse_args()
    mesh: MeshSection = load_sections(parsed.config, parsed.overrides, {"mesh": MeshSection})["mesh"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s mps %(levelname)s %(message)s")
    if mesh.policy is None or not mesh.policy.daemon:
        raise WrongState(f"mesh.devices = {mesh.devices!r} and mesh.sharing = {mesh.sharing!r} need no MPS daemon",
                         reason="MPS_NOT_NEEDED")
    daemon = ControlDaemon(find_control(mesh.sharing), mesh.mps_pipe_dir, mesh.mps_log_dir)

    def stop(*_: object) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(_Stop):
        MpsService(daemon, mesh.mps_socket).run()


if __name__ == "__main__":
    sys.exit(run_service(main))
