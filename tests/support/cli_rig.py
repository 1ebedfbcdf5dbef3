"""The `rollplex` command as users run it: a process of its own, and a mesh that is always brought down."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.pidfds import ended_within

TIMEOUT_S = 200.0
COMMAND = (sys.executable, "-m", "rollplex_client.cli")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str
    log: str = ""
    """The end of the coordinator's, for messages of tests."""

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout; nothing else may be there."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, f"not one line of JSON: {self.stdout!r}, {self.stderr}"
        data = json.loads(lines[0])
        assert isinstance(data, dict)
        return data

    @property
    def result(self) -> dict[str, Any]:
        """Of a command that must have succeeded."""
        assert self.status == 0, f"exit {self.status}: {self.stdout}{self.stderr}{self.log}"
        return self.data

    @property
    def error(self) -> dict[str, Any]:
        """Of a command that must have failed; people got the same words on stderr."""
        assert self.status in (1, 2), f"exit {self.status}: {self.stdout}{self.stderr}"
        error = self.data["error"]
        assert self.stderr.startswith(f"error: {error['message']} [{error['reason']}]"), self.stderr
        assert "Traceback" not in self.stderr
        return error


class Cli:
    """Runs commands in a short folder of its own, over one runtime directory; `close` ends the mesh that is left there."""

    def __init__(self, runtime_dir: str | None = "rt", env: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S
                 ) -> None:
        # A Unix socket's path has 107 bytes at most, and pytest's directories are long.
        self.folder = Path(tempfile.mkdtemp(prefix="rpx-"))
        self.runtime_dir = self.folder / (runtime_dir or ".rollplex")
        self._options = ("--runtime-dir", str(self.runtime_dir)) if runtime_dir else ()
        self._timeout_s = timeout_s
        self.env = {**os.environ, "PYTHONWARNINGS": "ignore", **(env or {})}

    def arguments(self, *arguments: object) -> list[str]:
        return [*COMMAND, "--json", *self._options, *map(str, arguments)]

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(self.arguments(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                cwd=self.folder, env=self.env)

    def __call__(self, *arguments: object) -> Done:
        process = self.start(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=self._timeout_s)
        finally:
            end(process)
        log = self.runtime_dir / "logs" / "coordinator.log"
        return Done(process.returncode, stdout, stderr, log.read_text()[-4000:] if log.is_file() else "")

    def close(self) -> None:
        try:
            supervisor = self._supervisor()
            if supervisor is not None:
                self("down")
                end_pid(supervisor)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _supervisor(self) -> int | None:
        path = self.runtime_dir / "supervisord.pid"
        return int(path.read_text()) if path.is_file() else None

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end(process: subprocess.Popen) -> None:
    """Ends a process of ours that may have ended already."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def end_pid(pid: int, timeout_s: float = 30.0) -> None:
    """Ends a supervisor that `down` has left; it takes its services along."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not ended_within(descriptor, timeout_s):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
