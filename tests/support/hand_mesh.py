"""A mesh whose services are started by hand, each as `python -m rollplex.<name>`, with the demo's videos at hand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.core.config import MeshSection
from rollplex.core.strict import to_plain, to_toml
from rollplex.rpc.channel import sync_channel
from rollplex_client import Client

ENGINES = {"trainer": "--rank", "reference": "--rank", "rollout": "--replica"}
START_TIMEOUT_S = 180.0


def _module(name: str) -> list[str]:
    """Module and options of a service."""
    role, _, index = name.rpartition("-")
    if role in ENGINES:
        return [f"rollplex.{role}", ENGINES[role], index]
    return ["rollplex.broker.keeper" if name == "keeper" else f"rollplex.{name}"]


class HandMesh:
    """`start`, `kill`, `stop` take a service's name; `close` ends what is left. `sizes`: more of [mesh]."""

    def __init__(self, checkpoint: Path, media_root: Path, *, dtype: str = "float32", sizes: dict[str, Any] | None = None,
                 coordinator: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        # A Unix socket's path has 107 bytes at most, and pytest's directories are long.
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="rollplex-e2e-"))
        self.mesh = MeshSection(runtime_dir=self.runtime_dir, drain_timeout_s=2.0, **sizes or {})
        self.processes: dict[str, subprocess.Popen] = {}
        self.environment: dict[str, str] = {}
        """Of every service that is started from now on."""
        self.config = self.runtime_dir / "mesh.toml"
        self.config.write_text(to_toml({
            "mesh": to_plain(self.mesh),
            "model": {"checkpoint": str(checkpoint), "dtype": dtype},
            "coordinator": {"media_roots": [str(media_root)], **(coordinator or {}), "media": {
                "video_min_pixels": 3136, "video_max_pixels": 3136, "max_frames": 64}}, **sections}))

    @property
    def names(self) -> list[str]:
        """Every service, in starting order."""
        engines = [f"{role}-{index}" for role in ENGINES for index in range(self.mesh.ranks(role))]
        return ["keeper", "broker", "reward", *engines, "coordinator"]

    @property
    def client(self) -> Client:
        return Client(self.mesh.address("coordinator"), wait_for_ready=True)

    def start(self, *names: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """Starts services and waits until each says SERVING. `arguments`, as --set, and `environment` are for these alone."""
        for name in names:
            with (self.runtime_dir / f"{name}.log").open("a") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", *_module(name), "--config", str(self.config), *arguments], stdout=log, stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **self.environment,
                         **(environment or {})})
        for name in names:
            self._wait_serving(name)

    def _wait_serving(self, name: str) -> None:
        if name == "keeper":
            return
        deadline = time.monotonic() + START_TIMEOUT_S
        with sync_channel(self.mesh.address(name)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)}"
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                time.sleep(0.05)
        raise AssertionError(f"{name} does not serve:\n{self.log(name)}")

    def log(self, name: str) -> str:
        return (self.runtime_dir / f"{name}.log").read_text()[-4000:]

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str) -> None:
        """SIGKILL: nothing of the process runs afterwards."""
        self.processes[name].kill()
        self.processes.pop(name).wait(30)

    def stop(self, name: str) -> int:
        """SIGTERM, as a supervisor does; the exit status."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(30)

    def close(self) -> None:
        for name in reversed(list(self.processes)):
            self.processes[name].send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)
        self.processes.clear()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
