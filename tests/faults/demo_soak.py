"""The demo with its services killed and stopped at random: figures as JSON, status 1 for a lost iteration.

    python -m tests.faults.demo_soak --minutes 30 --out runs/demo-soak

A service is ended when every one has served for a while and an iteration has been done since the last death. `--stops` of the
deaths are SIGSTOP, which the watchdog has to notice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollplex.core.errors import RollplexError
from rollplex_client.chaos.soak import PAUSE_S, resident_bytes
from rollplex_client.cli.supervision import Process, Supervisor

SPARED = ("watchdog",)
"""The supervisor starts it again; that nothing of the run hangs on it is shown elsewhere."""
SETTLED_S = 3.0
START_S = 600.0


class DemoSoak:
    def __init__(self, out: Path, runtime_dir: Path, seed: int, stops: float) -> None:
        self._metrics, self._runtime_dir = out / "metrics.jsonl", runtime_dir
        self._random, self._stops = random.Random(seed), stops
        self.deaths: dict[str, int] = {}

    @property
    def iterations(self) -> int:
        """Done by the demo's main run, validations not counted."""
        return len(self._trained())

    def _trained(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            # A line that is being written is none yet.
            rows = map(json.loads, self._metrics.read_text().rpartition("\n")[0].splitlines())
            return [row for row in rows if row["state"] == "done" and not row["validation"]]
        return []

    def whole(self) -> dict[str, Process]:
        """All services, or nothing while one is not back."""
        try:
            found = {process.name: process for process in Supervisor(self._runtime_dir).processes()}
        except RollplexError:
            return {}
        settled = all(process.state == "RUNNING" and process.uptime_s > SETTLED_S for process in found.values())
        return found if settled else {}

    def memory(self) -> dict[str, float]:
        """RSS in MiB by service."""
        return {name: round(resident_bytes(process.pid) / 2**20, 1) for name, process in self.whole().items()}

    def end_one(self) -> None:
        services = {name: process for name, process in self.whole().items() if name not in SPARED}
        if not services:
            return
        name = self._random.choice(sorted(services))
        how = signal.SIGSTOP if self._random.random() < self._stops else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(services[name].pid, how)
            key = f"{name} {how.name}"
            self.deaths[key] = self.deaths.get(key, 0) + 1

    def run(self, demo: subprocess.Popen[bytes], minutes: float) -> dict[str, object]:
        _until(lambda: self.iterations >= 2 and bool(self.whole()), demo, START_S)
        start, first, until = self.memory(), self.iterations, time.monotonic() + 60 * minutes
        while time.monotonic() < until and demo.poll() is None:
            time.sleep(self._random.uniform(*PAUSE_S))
            if self.whole():
                seen = self.iterations
                self.end_one()
                _until(lambda seen=seen: self.iterations > seen, demo, START_S)
        with contextlib.suppress(TimeoutError):
            _until(lambda: bool(self.whole()), demo, START_S)
        return {"minutes": minutes, "iterations": self.iterations - first, "lost": int(demo.poll() is not None),
                "without_update": sum(row["metrics"]["rollplex/update_skipped"] > 0 for row in self._trained()[first:]),
                "deaths": dict(sorted(self.deaths.items())), "deaths_total": sum(self.deaths.values()),
                "rss_mib_start": start, "rss_mib_end": self.memory()}


def _until(holds, demo: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds() and demo.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing moved for {timeout_s:g} s")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stops", type=float, default=0.2, help="share of deaths that are SIGSTOP")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-soak"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Started in the background it is ignored, also by the demo, which takes its mesh down on it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="rp-soak-") as folder, (arguments.out / "demo.log").open("wb") as log:
        command = [sys.executable, "-m", "rollplex_client.cli", "demo", "--out", str(arguments.out), "--runtime-dir", folder,
                   "--iterations", "100000", "--seed", str(arguments.seed)]
        demo = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            found = DemoSoak(arguments.out, Path(folder), arguments.seed, arguments.stops).run(demo, arguments.minutes)
        finally:
            demo.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                demo.wait(60)
            demo.kill()
            shutil.copytree(Path(folder) / "logs", arguments.out / "logs", dirs_exist_ok=True)
    (arguments.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(bool(found["lost"]))


if __name__ == "__main__":
    raise SystemExit(main())
