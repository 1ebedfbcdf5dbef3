"""Kills at random times while iterations go on: what is done, what is lost, and what memory comes to."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.errors import RollplexError
from rollplex_client.chaos.cells import SERVICES
from rollplex_client.chaos.drill import Drill
from rollplex_client.chaos.rig import Rig

PAUSE_S = (0.5, 6.0)
"""Between a whole mesh and the next kill."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Memory:
    """Of an idle mesh, in bytes."""

    resident: Mapping[str, int]
    """RSS by service: its own pages and those of slabs that it has touched."""
    host_slabs: int


@dataclass(slots=True)
class Soak:
    """What a soak has come to."""

    minutes: float
    iterations: int = 0
    lost: list[str] = field(default_factory=list)
    """Iterations that failed or ended with another snapshot than the unfaulted run's, and why."""
    kills: dict[str, int] = field(default_factory=dict)
    start: Memory | None = None
    end: Memory | None = None


class Killer(threading.Thread):
    """Ends one service after the other, each when the mesh is whole and the last one's iteration is over."""

    def __init__(self, rig: Rig, seed: int, actions: tuple[str, ...]) -> None:
        super().__init__(name="killer", daemon=True)
        self._rig, self._random, self._actions = rig, random.Random(seed), actions
        self._enough, self._iterated = threading.Event(), threading.Event()
        self.kills = dict.fromkeys(SERVICES, 0)

    def iteration_over(self) -> None:
        """Told by who iterates: an iteration outlives one death of a service, not two."""
        self._iterated.set()

    def stop(self) -> None:
        self._enough.set()
        self.join()

    def run(self) -> None:
        while not self._enough.wait(self._random.uniform(*PAUSE_S)):
            try:
                pids = self._rig.wait_whole()
            except RollplexError:
                continue  # whoever iterates says so
            name = self._random.choice(SERVICES)
            self._iterated.clear()
            try:
                os.kill(pids[name], SIGNALS[self._random.choice(self._actions)])
            except ProcessLookupError:
                continue
            self.kills[name] += 1
            while not self._iterated.wait(0.1) and not self._enough.is_set():
                pass


def soak(rig: Rig, drill: Drill, minutes: float, seed: int, actions: tuple[str, ...],
         on_iteration: Callable[[Soak], None]) -> Soak:
    """After `drill.reference`."""
    taken = Soak(minutes, start=memory(rig))
    killer = Killer(rig, seed, actions)
    until = time.monotonic() + 60 * minutes
    killer.start()
    try:
        while time.monotonic() < until:
            wrong = _iterate(rig, drill)
            taken.iterations += not wrong
            taken.lost += [wrong] if wrong else []
            taken.kills = dict(killer.kills)
            killer.iteration_over()
            on_iteration(taken)
    finally:
        killer.stop()
    taken.kills = dict(killer.kills)
    rig.wait_whole()
    taken.end = memory(rig)
    return taken


def _iterate(rig: Rig, drill: Drill) -> str:
    """What is wrong with the next iteration; empty when nothing is."""
    try:
        if not rig.run or rig.iterations >= len(drill.expected):
            rig.new_run()
        number = rig.iterations
        handle = rig.submit()
        rig.finish(handle)
        wrong = drill.compare(handle, number)
    except RollplexError as error:
        wrong = f"{rig.run}, iteration {rig.iterations - 1}: {error.reason}: {error}"
    if wrong:
        rig.iterations = len(drill.expected)
    return wrong


def memory(rig: Rig) -> Memory:
    pids = rig.wait_whole()
    return Memory({name: resident_bytes(pid) for name, pid in pids.items()}, rig.client.mesh().host_slab_bytes)


def resident_bytes(pid: int) -> int:
    """VmRSS; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
