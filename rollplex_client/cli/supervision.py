"""supervisord: started by `up`, then asked over XML-RPC on its Unix socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
import xmlrpc.client
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput, DeadlineExceeded, InternalError, NotFound, Unavailable
from rollplex.core.pidfds import ended_within
from rollplex.core.sharing import without_mps_variables
from rollplex_client.cli.programs import SUPERVISOR_LOG, SUPERVISOR_PID, SUPERVISOR_SOCKET

FIRST_TO_STOP = "coordinator"
_NOT_RUNNING = 70
"""supervisor.xmlrpc.Faults.NOT_RUNNING: it ended by itself meanwhile."""


@dataclass(frozen=True, slots=True)
class Process:
    """One supervised process, as supervisor sees it."""

    name: str
    state: str
    """STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED or FATAL."""
    pid: int
    uptime_s: float
    exit_status: int
    error: str


class Supervisor:
    """The supervisor of one runtime directory. Raises Unavailable when none runs there."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        try:
            from supervisor.xmlrpc import SupervisorTransport
        except ImportError as error:
            raise Unavailable("the services are not installed here: pip install 'rollplex[cpu]' (or [gpu])",
                              reason="SERVICES_NOT_INSTALLED") from error
        transport = SupervisorTransport(None, None, serverurl=f"unix://{runtime_dir / SUPERVISOR_SOCKET}")
        self._proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == _NOT_RUNNING:
                return None
            raise InternalError(f"supervisor: {fault.faultString}", reason="SUPERVISOR_FAULT") from fault
        except (OSError, xmlrpc.client.ProtocolError) as error:
            raise Unavailable(f"no mesh is up in {self.runtime_dir}; start one with `rollplex up`",
                              reason="MESH_DOWN", path=self.runtime_dir) from error

    def is_up(self) -> bool:
        with contextlib.suppress(Unavailable):
            return bool(self.pid())
        return False

    def pid(self) -> int:
        return self._call("getPID")

    def processes(self) -> list[Process]:
        return [Process(item["name"], item["statename"], item["pid"],
                        float(item["now"] - item["start"]) if item["pid"] else 0.0, item["exitstatus"],
                        item["spawnerr"]) for item in self._call("getAllProcessInfo")]

    def names(self) -> list[str]:
        return [process.name for process in self.processes()]

    def restart(self, name: str) -> None:
        """Stops (draining) and starts. Raises NotFound, InternalError when it does not start."""
        self._call("startProcess", self._stop(name), False)

    def _stop(self, name: str) -> str:
        """Returns supervisor's own name for it."""
        info = next((item for item in self._call("getAllProcessInfo") if item["name"] == name), None)
        if info is None:
            raise NotFound(f"the mesh has no service {name!r}; it has {', '.join(self.names())}",
                           reason="NO_SUCH_SERVICE", service=name)
        full_name = f"{info['group']}:{name}"
        if info["statename"] not in ("STOPPED", "EXITED", "FATAL"):
            self._call("stopProcess", full_name)
        return full_name

    def shut_down(self, timeout_s: float) -> int:
        """Stops the coordinator, then all others, then the supervisor; returns its pid.

        Raises DeadlineExceeded when it lives on.
        """
        pid = self.pid()
        descriptor = os.pidfd_open(pid)
        try:
            # First and alone: an iteration that runs ends in good order only while its engines are there.
            if FIRST_TO_STOP in self.names():
                self._stop(FIRST_TO_STOP)
            self._call("shutdown")
            if not ended_within(descriptor, timeout_s):
                raise DeadlineExceeded(f"supervisor {pid} has not stopped within {timeout_s:.0f} s",
                                       reason="MESH_NOT_STOPPED", pid=pid)
        finally:
            os.close(descriptor)
        return pid


@contextlib.contextmanager
def claimed(runtime_dir: Path) -> Iterator[None]:
    """Holds the directory against another `up` and cleans what dead ones left.

    Raises BadInput, naming the process, when somebody still listens there.
    """
    descriptor = os.open(runtime_dir / "up.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another `rollplex up` is at work in {runtime_dir}", reason="RUNTIME_DIR_IN_USE",
                           path=runtime_dir) from None
        for path in sorted(runtime_dir.glob("*.sock")):
            pid = listener_pid(path)
            if pid is not None:
                raise BadInput(f"runtime directory {runtime_dir} is in use: process {pid} listens on {path.name}; "
                               "run `rollplex down`, end that process, or choose another --runtime-dir",
                               reason="RUNTIME_DIR_IN_USE", path=runtime_dir, pid=pid)
            path.unlink(missing_ok=True)
        (runtime_dir / SUPERVISOR_PID).unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def listener_pid(path: Path) -> int | None:
    """The process that listens on a Unix socket of either kind; None when nobody does."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                return None
            except OSError as error:
                if error.errno == errno.EPROTOTYPE:
                    continue
                raise
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return struct.unpack("3i", credentials)[0]
    return None


def start(runtime_dir: Path, config: Path) -> None:
    """Starts supervisord, which detaches itself. Raises InternalError with its own words when it does not."""
    done = subprocess.run([sys.executable, "-m", "supervisor.supervisord", "-c", str(config)], cwd=runtime_dir,
                          capture_output=True, text=True, check=False, env=without_mps_variables(dict(os.environ)))
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InternalError(f"supervisord did not start: {said[-1] if said else f'exit {done.returncode}'}; see "
                            f"{runtime_dir / SUPERVISOR_LOG}", reason="SUPERVISOR_FAILED")
