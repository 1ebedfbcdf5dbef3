"""A private MPS control daemon: a child of this process, in directories of its own, spoken to through its own command."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from rollplex.core.errors import BadInput, Unavailable
from rollplex.core.pidfds import ended_within
from rollplex.core.sharing import CONTROL, LOG_VARIABLE, control_environment

log = logging.getLogger("mps")

COMMAND_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def find_control(sharing: str) -> str:
    """Path of the control command. Raises BadInput, naming the policy that needs it and what does without."""
    found = shutil.which(CONTROL)
    if found is None:
        raise BadInput(f"mesh.sharing is {sharing!r}, which needs {CONTROL}, a part of NVIDIA's driver that is not on PATH; "
                       "install it (package nvidia-compute-utils), or set mesh.sharing = \"time-slice\"", reason="MPS_MISSING",
                       sharing=sharing)
    return found


class ControlDaemon:
    """`start` and `stop` are the pair. One thread."""

    def __init__(self, command: str, pipe_directory: Path, log_directory: Path) -> None:
        self._command, self._pipe_directory, self._log_directory = command, pipe_directory, log_directory
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = control_environment(dict(os.environ), pipe_directory) | {LOG_VARIABLE: str(log_directory)}

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_status(self) -> int | None:
        """None while it runs, or before it started."""
        return self._process.poll() if self._process is not None else None

    def start(self, timeout_s: float) -> None:
        """Returns when it takes commands. Raises Unavailable when it ends or keeps silent."""
        # Sockets of a daemon that was killed: a client would try them.
        shutil.rmtree(self._pipe_directory, ignore_errors=True)
        for directory in (self._pipe_directory, self._log_directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A server whose control daemon is killed becomes ours, so that its pid stays its own until we have ended it.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._process = subprocess.Popen([self._command, "-f"], env=self._environment, stdin=subprocess.DEVNULL,
                                         preexec_fn=_die_with_parent)
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self.exit_status is not None:
                raise Unavailable(f"{CONTROL} ended with status {self.exit_status} as it started; see {self._log_directory}",
                                  reason="MPS_DOWN")
            if time.monotonic() > deadline:
                raise Unavailable(f"{CONTROL} does not answer after {timeout_s:.0f} s; see {self._log_directory}",
                                  reason="MPS_DOWN")
            time.sleep(_POLL_S)

    def start_server(self, timeout_s: float) -> None:
        """Has the server ready before clients come, who may be refused while it starts; without one in time the first client
        has it started, as ever."""
        deadline = time.monotonic() + timeout_s
        try:
            self.ask(f"start_server -uid {os.getuid()}", timeout_s)
            while not (servers := self.servers()) or "INITIALIZING" in servers.values():
                if time.monotonic() > deadline:
                    raise Unavailable(f"no MPS server after {timeout_s:.0f} s", reason="MPS_DOWN")
                time.sleep(_POLL_S)
        except Unavailable as error:
            log.warning("%s; the first client starts it (%s)", error, self._log_directory)

    def servers(self) -> dict[int, str]:
        """Status by pid of the server process: INITIALIZING, ACTIVE or FAULT. Raises Unavailable."""
        return {int(word): self._status(word) for word in self.ask("get_server_list").split() if word.isdecimal()}

    def _status(self, server: str) -> str:
        try:
            words = self.ask(f"get_server_status {server}").upper()
        except Unavailable:
            # It ended after it was listed, which the next list shows.
            words = ""
        return next((state for state in ("FAULT", "INITIALIZING") if state in words), "ACTIVE")

    def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """The control command's answer. Raises Unavailable."""
        try:
            done = subprocess.run([self._command], input=command + "\n", env=self._environment, capture_output=True, text=True,
                                  timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{CONTROL} does not answer {command!r} within {timeout_s:.0f} s", reason="MPS_DOWN") from None
        if done.returncode:
            raise Unavailable(f"{CONTROL} refuses {command!r}: {(done.stderr or done.stdout).strip()}", reason="MPS_DOWN")
        return done.stdout

    def stop(self, timeout_s: float, servers: Iterable[int] = ()) -> None:
        """Asks it to quit, then ends it, and those `servers` that outlive it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(Unavailable):
                self.ask("quit", timeout_s)
        for ending in (None, process.terminate, process.kill):
            if ending is not None:
                ending()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                break
        for pid in servers:
            _end_adopted(pid, timeout_s)
        shutil.rmtree(self._pipe_directory, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            self.ask("get_server_list")
        except Unavailable:
            return False
        return True


def _end_adopted(pid: int, timeout_s: float) -> None:
    """Ends a server that became this process's child when its control daemon died, and reaps it. No other process: any but a
    child is left alone, since its pid may be somebody else's by now."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            descriptor = os.pidfd_open(pid)
        except (ChildProcessError, ProcessLookupError):
            return
        try:
            signal.pidfd_send_signal(descriptor, sign)
            ended_within(descriptor, timeout_s)
        finally:
            os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _die_with_parent() -> None:
    # Nobody is left to ask it to quit.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


_LIBC = ctypes.CDLL(None, use_errno=True)
