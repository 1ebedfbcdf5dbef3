"""A mesh as `rollplex up` starts it, under its supervisor: services that die come back by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slab_hashes import SlabHashes

from rollplex_client import Client
from rollplex_client.cli.mesh import HealthProbe, bring_up, last_lines, stop_timeout_s
from rollplex_client.cli.programs import log_path
from rollplex_client.cli.settings import Settings, merge, parse_settings
from rollplex_client.results import PhaseSpan, Progress

TOKEN_SUM = Path(__file__).parent / "token_sum.py"
ENGINES = ("trainer-0", "reference-0", "rollout-0")
START_S = 300.0
"""A first vLLM on a busy machine."""
RESTART_S = 240.0


class SupervisedMesh:
    """`kill`, `pids` and `restarted` speak of services by name; `hashes` of an open run's slabs."""

    def __init__(self, settings: Settings, supervisor: Any, client: Client) -> None:
        self.settings, self.client = settings, client
        self._supervisor = supervisor
        self.hashes = SlabHashes(settings.mesh, lambda: self.pids()["broker"])

    @property
    def mesh(self):
        return self.settings.mesh

    def pids(self) -> dict[str, int]:
        """0 while a service is down."""
        return {item.name: item.pid for item in self._supervisor.processes()}

    def kill(self, *names: str) -> None:
        """SIGKILL; returns at once."""
        pids = self.pids()
        for name in names:
            os.kill(pids[name], signal.SIGKILL)

    def restarted(self, before: dict[str, int], *names: str) -> None:
        """Waits until other processes of these names serve."""
        deadline = time.monotonic() + RESTART_S
        probe = HealthProbe(self.settings)
        try:
            while True:
                pids = self.pids()
                health = {name: state for name, state in probe.ask().items() if name in names}
                if all(pids[name] not in (0, before[name]) and health[name] == "SERVING" for name in names):
                    return
                assert time.monotonic() < deadline, f"{health}; {before} and {pids}\n{self.logs(*names)}"
                time.sleep(0.1)
        finally:
            probe.close()

    def logs(self, *names: str) -> str:
        return "\n".join(f"{name}:\n" + "\n".join(last_lines(log_path(self.mesh.runtime_dir, name), 25)) for name in names)


@contextmanager
def supervised_mesh(tables: dict[str, Any]) -> Iterator[SupervisedMesh]:
    """`tables`: sections of the configuration. A reward `ids` is served and registered."""
    # A Unix socket's path has 107 bytes at most, and pytest's directories are long.
    with tempfile.TemporaryDirectory(prefix="rpb-") as folder:
        settings = parse_settings(merge({"mesh": {"runtime_dir": f"{folder}/rt", "drain_timeout_s": 2.0},
                                         "coordinator": {"builtin_reward": ""}}, tables))
        supervisor = bring_up(settings, timeout_s=START_S)
        made: SupervisedMesh | None = None
        try:
            with served_reward(Path(folder) / "ids.sock") as address, \
                    Client(settings.coordinator_address, wait_for_ready=True) as client:
                client.register_reward("ids", address)
                made = SupervisedMesh(settings, supervisor, client)
                yield made
        finally:
            if made is not None:
                made.hashes.dismiss()
            supervisor.shut_down(stop_timeout_s(settings))


@contextmanager
def served_reward(socket: Path) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward", f"{TOKEN_SUM}:token_sum", "--address",
                                f"unix:{socket}"])
    try:
        yield f"unix:{socket}"
    finally:
        process.terminate()
        process.wait(10)


class Once:
    """Calls `strike` when the first event of a kind has come: `samples` (some responses have ended) or the name of a span that
    has begun. For `Client.wait(on_event=...)`."""

    def __init__(self, moment: str, strike: Any) -> None:
        self._moment, self._strike = moment, strike
        self.struck = False

    def __call__(self, event: Any) -> None:
        body = event.body
        now = (isinstance(body, Progress) and 0 < body.samples_done < body.samples_total if self._moment == "samples" else
               isinstance(body, PhaseSpan) and body.span == self._moment and not body.ended)
        if now and not self.struck:
            self.struck = True
            self._strike()
