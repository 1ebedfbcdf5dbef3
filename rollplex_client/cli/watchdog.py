"""`python -m rollplex_client.cli.watchdog`: ends what is stopped or hangs, so that the supervisor starts it again.

No deadline of a caller helps against a process that is stopped and keeps its sockets, leases and mappings. This program, which
the supervisor runs beside the services, looks at every descendant of the supervisor, rank workers included: one that has been
stopped for `mesh.stall_timeout_s` is killed, and so is a service that has served and whose gRPC health has not answered for
`mesh.hang_timeout_s`. The keeper and the supervisor are continued instead: what they hold, nobody else may have. A process that
a debugger holds is traced, not stopped, and left alone. What starts has time without end: who waits for a start has a deadline
of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.core.config import MeshSection
from rollplex.core.entry import arguments, load_sections, run_service
from rollplex.core.errors import RollplexError
from rollplex.rpc.channel import sync_channel
from rollplex.rpc.handles import listen
from rollplex_client.cli.supervision import Supervisor

log = logging.getLogger("watchdog")

LONGEST_LOOK_S = 1.0
"""Between two looks; a quarter of the timeout where that is shorter."""
HEALTH_TIMEOUT_S = 5.0
CONTINUED = ("keeper",)
"""Killed while the broker is being restarted, a keeper would take all slabs along."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process at one look."""

    pid: int
    parent: int
    state: str
    """As /proc/PID/stat has it: `T` is stopped, `t` traced."""
    start_ticks: int
    """Since boot; with the pid it names one process for ever."""

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


def parse_stat(text: str) -> Seen:
    """Of a /proc/PID/stat; the command's name may hold anything."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Seen(int(head.split(" ", 1)[0]), int(fields[1]), fields[0], int(fields[19]))


def read_stat(pid: int) -> Seen | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def all_processes() -> dict[int, Seen]:
    found = (read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {seen.pid: seen for seen in found if seen is not None}


def descendants(root: int, seen: Mapping[int, Seen]) -> list[Seen]:
    """Of a process, without itself."""
    children: dict[int, list[Seen]] = {}
    for process in seen.values():
        children.setdefault(process.parent, []).append(process)
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += [process.pid for process in below]
    return found


class Stalls:
    """Since when each process is stopped. Pure: the caller has looked, and acts."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[tuple[int, int], float] = {}

    def overdue(self, processes: list[Seen], now_s: float) -> list[Seen]:
        stopped = {process.identity: process for process in processes if process.state == "T"}
        self._since = {identity: self._since.get(identity, now_s) for identity in stopped}
        if not self._timeout_s:
            return []
        return [stopped[identity] for identity, since in self._since.items() if now_s - since >= self._timeout_s]


class Silences:
    """When each service's health answered last. Only one that has answered once can fall silent."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answered: dict[tuple[int, int], float] = {}

    def overdue(self, answers: Mapping[tuple[int, int], bool], now_s: float) -> list[tuple[int, int]]:
        """`answers`: of the services that run now, by identity, whether their health answered anything at all."""
        self._answered = {identity: now_s if answer else self._answered[identity]
                          for identity, answer in answers.items() if answer or identity in self._answered}
        return [identity for identity, last in self._answered.items() if self._timeout_s and now_s - last >= self._timeout_s]


def kill(process: tuple[int, int], number: signal.Signals = signal.SIGKILL) -> bool:
    """Signals the very process that was seen. False when it is gone, and its pid perhaps another's."""
    pid, start_ticks = process
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor holds whoever has the pid now: if that is the one that was seen, it will not change any more.
        now = read_stat(pid)
        if now is None or now.start_ticks != start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


class Watchdog:
    """`look` does one round; `run` does rounds until the process is ended."""

    def __init__(self, mesh: MeshSection, root: int, names: Callable[[], Mapping[int, str]]) -> None:
        """`root`: the supervisor's pid. `names`: of its processes, by pid; may raise RollplexError."""
        self._mesh, self._root, self._names = mesh, root, names
        self._stalls, self._silences = Stalls(mesh.stall_timeout_s), Silences(mesh.hang_timeout_s)
        self.look_s = min(LONGEST_LOOK_S, (mesh.stall_timeout_s or mesh.hang_timeout_s) / 4)
        self._ask_s, self._asked_s = min(HEALTH_TIMEOUT_S, mesh.hang_timeout_s / 4), 0.0
        self._channels: dict[str, grpc.Channel] = {}
        self._asked: dict[str, tuple[tuple[int, int], grpc.Future]] = {}

    def run(self, listener: socket.socket) -> None:
        while True:
            until = time.monotonic() + self.look_s
            while (left := until - time.monotonic()) > 0:
                listener.settimeout(left)
                # Whoever looks whether we live connects.
                with contextlib.suppress(TimeoutError), listener.accept()[0]:
                    continue
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        processes = all_processes()
        below = descendants(self._root, processes)
        root = [processes[self._root]] if self._root in processes else []
        for process in self._stalls.overdue([*below, *root], now_s):
            name = self._known_names().get(process.pid, f"a child of {process.parent}")
            # A supervisor that was killed would leave everything without one: it is continued, whoever stopped it.
            number = signal.SIGCONT if process.pid == self._root or name in CONTINUED else signal.SIGKILL
            if kill(process.identity, number):
                log.error("%s (pid %d) has been stopped for %g s: %s", name, process.pid, self._mesh.stall_timeout_s, number.name)
        if self._mesh.hang_timeout_s and now_s - self._asked_s >= self._ask_s:
            self._asked_s = now_s
            self._end_silent(below, now_s)

    def _end_silent(self, below: list[Seen], now_s: float) -> None:
        names = self._known_names()
        services = {names[process.pid]: process.identity for process in below if names.get(process.pid) in self._mesh.services}
        for identity in self._silences.overdue(self._ask(services), now_s):
            if kill(identity):
                log.error("%s (pid %d) has not answered for %g s: SIGKILL", names[identity[0]], identity[0],
                          self._mesh.hang_timeout_s)

    def _known_names(self) -> Mapping[int, str]:
        try:
            return self._names()
        except RollplexError as error:
            log.warning("%s", error)
            return {}

    def _ask(self, services: Mapping[str, tuple[int, int]]) -> dict[tuple[int, int], bool]:
        """What the calls of earlier looks came to, and new calls where none is open. A call that is open counts as no answer."""
        answers = {}
        for name, identity in services.items():
            asked = self._asked.get(name)
            answers[identity] = asked is not None and asked[0] == identity and asked[1].done() and _answered(asked[1])
            if asked is None or asked[1].done():
                self._asked[name] = identity, self._check(name)
        return answers

    def _check(self, name: str) -> grpc.Future:
        if name not in self._channels:
            self._channels[name] = sync_channel(self._mesh.address(name))
        return health_pb2_grpc.HealthStub(self._channels[name]).Check.future(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)


def _answered(call: grpc.Future) -> bool:
    """Any answer of the service's own counts, a refusal too."""
    return call.exception() is None or call.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


def supervised(runtime_dir: Path) -> Callable[[], Mapping[int, str]]:
    supervisor = Supervisor(runtime_dir)
    return lambda: {process.pid: process.name for process in supervisor.processes() if process.pid}


def main() -> None:
    parsed = arguments("watchdog", "Ends processes of a mesh that are stopped or hang.").parse_args()
    mesh: MeshSection = load_sections(parsed.config, parsed.overrides, {"mesh": MeshSection})["mesh"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s watchdog %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with listen(mesh.watchdog_socket) as listener:
            log.info("stopped processes are killed (%s: continued) after %g s, silent ones after %g s; 0: never",
                     ", ".join(CONTINUED), mesh.stall_timeout_s, mesh.hang_timeout_s)
            Watchdog(mesh, os.getppid(), supervised(mesh.runtime_dir)).run(listener)
    finally:
        mesh.watchdog_socket.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(run_service(main))
