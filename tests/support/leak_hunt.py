"""Iterations and kills over a mesh of real processes, and what every survivor holds before and after.

A process is counted when it has done WARM_UP iterations, and again before it is killed, or at the end; the broker's custody
likewise. Every iteration must end DONE, the ones in which a service dies too.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from faulty_mesh import PROMPTS, FaultyMesh, until
from PIL import Image

from rollplex_client import Media, Prompt
from rollplex_client.chaos import leaks
from rollplex_client.chaos.leaks import Snapshot
from rollplex_client.results import IterationHandle

WARM_UP = 3
"""Iterations after which pools, caches and lazy imports have what they will have."""
SETTLE_S = 20.0
"""What is given back after an iteration's end may take this long: channels close, pidfds are reaped."""
PROBED_S = 0.5
RUN = {"deterministic": False, "recovery_timeout_s": 120.0}


@dataclass
class Hunt:
    """Counts of one hunt."""

    states: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    """How often a process of each service was compared with its first count."""
    leaks: list[str] = field(default_factory=list)
    first: dict = field(default_factory=dict)
    last: dict = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.leaks and set(self.states) == {"done"}


class Counted:
    """First counts by process; `compare` holds the present against them."""

    def __init__(self, mesh: FaultyMesh, client, hunt: Hunt) -> None:
        self._mesh, self._client, self._hunt = mesh, client, hunt
        self._first: dict[str, Snapshot] = {}
        self._age = dict.fromkeys(mesh.names, 0)
        self._custody: Snapshot | None = None

    def born(self, name: str) -> None:
        self._age[name] = 0
        self._first.pop(name, None)
        if name == "broker":
            self._custody = None

    def iteration_done(self) -> None:
        for name in self._age:
            self._age[name] += 1
            if self._age[name] == WARM_UP:
                self._first[name] = leaks.snapshot({name: self._mesh.pid(name)})
                self._hunt.first.setdefault(name, leaks.totals(self._first[name])[name])
        if self._custody is None and min(self._age.values()) >= 1:
            self._custody = self._now()
            self._hunt.first.setdefault("custody", dict(self._custody.custody))

    def compare(self, *names: str) -> None:
        """Of these, and of custody; waits until nothing is left over, and notes what stays."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = self._now()
            found = [line for name in names if name in self._first for line in leaks.difference(self._first[name], now)]
            if self._custody is not None:
                custody = Snapshot({}, self._custody.custody)
                found += leaks.difference(custody, Snapshot({}, now.custody))
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for name in names:
            self._hunt.compared[name] = self._hunt.compared.get(name, 0) + (name in self._first)
        self._hunt.leaks += found
        self._hunt.last = leaks.totals(now)

    def _now(self) -> Snapshot:
        custody = self._client.mesh()
        # The coordinator has asked every service for its health: connections that it closes may not have ended there yet.
        time.sleep(PROBED_S)
        return leaks.snapshot({name: self._mesh.pid(name) for name in self._mesh.names}, custody)


def hunt(mesh: FaultyMesh, iterations: int, kills: int, seed: int, note=lambda text: None) -> Hunt:
    """The mesh is up; its services are all there again afterwards. Kills are spread over the iterations after the first ones,
    each at a random service, in the middle of an iteration or after it."""
    chance, result = random.Random(seed), Hunt()
    victims = chance.sample(range(WARM_UP, iterations), kills)
    with mesh.client as client:
        run, counted = mesh.new_run(client, **RUN), Counted(mesh, client, result)
        prompts = [PROMPTS[0], picture(mesh.media_root / "still.png")]
        for number in range(iterations):
            dies = chance.choice(mesh.names) if number in victims else ""
            inside = chance.random() < 0.5
            if dies:
                counted.compare(dies)
                result.kills[dies] = result.kills.get(dies, 0) + 1
            with mesh.reward.held():
                handle = client.submit_iteration(run, prompts, request_id=f"hunt-{number}")
                if dies and inside:
                    until(lambda: mesh.reward.asked, "the reward is asked")
                    revive(mesh, dies)
                mesh.reward.release()
            state = ended(client, handle)
            if dies and not inside:
                revive(mesh, dies)
            result.states[state] = result.states.get(state, 0) + 1
            note(f"{number}: {state}{f', {dies} killed ' + ('inside' if inside else 'after') if dies else ''}")
            if dies:
                counted.born(dies)
            counted.iteration_done()
        counted.compare(*mesh.names)
    return result


def picture(path: Path) -> Prompt:
    Image.new("RGB", (84, 56), (200, 30, 30)).save(path)
    return Prompt.text("Which colour?", Media("image", path), ground_truth="A", problem_type="multiple choice")


def ended(client, handle: IterationHandle) -> str:
    """Its state, or the reason for which it failed."""
    until(lambda: client.get_iteration(handle).ended, f"iteration {handle.iteration}", 240.0)
    iteration = client.get_iteration(handle)
    return iteration.state if iteration.error is None else iteration.error.reason


def revive(mesh: FaultyMesh, name: str) -> None:
    """Killed, and started again as a supervisor does; it serves when this returns."""
    mesh.kill(name)
    mesh.start(name)
