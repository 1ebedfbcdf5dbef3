"""A soak's killer, on processes that are only there to be killed, and what a soak counts."""

from __future__ import annotations

import os
import subprocess

import pytest

from rollplex.core.errors import Aborted
from rollplex_client.chaos import soak as soaks
from rollplex_client.chaos.cells import SERVICES
from rollplex_client.chaos.soak import Killer, Soak, resident_bytes, soak
from rollplex_client.results import IterationHandle, Mesh


class SleepingRig:
    """A mesh of sleeping processes, each replaced as it is found dead."""

    def __init__(self) -> None:
        self.processes = {name: self._spawn() for name in SERVICES}
        self.run, self.iterations = "", 0
        self.client = self
        self.on_finish = lambda: None

    @staticmethod
    def _spawn() -> subprocess.Popen:
        return subprocess.Popen(["sleep", "600"])

    def wait_whole(self):
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.processes[name] = self._spawn()
        return {name: process.pid for name, process in self.processes.items()}

    def mesh(self):
        return Mesh((), "", "idle", host_slab_bytes=4096)

    def new_run(self):
        self.run, self.iterations = "run", 0

    def submit(self):
        self.iterations += 1
        return IterationHandle(self.run, self.iterations - 1, False, 0)

    def finish(self, handle):
        self.on_finish()

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


class FakeDrill:
    expected = (None,) * 3

    def __init__(self) -> None:
        self.wrong = ""

    def compare(self, handle, number):
        return self.wrong


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(soaks, "PAUSE_S", (0.0, 0.01))
    rig = SleepingRig()
    yield rig
    rig.end()


def test_one_death_an_iteration(rig):
    killer = Killer(rig, 0, ("kill",))
    killer.start()
    for round_ in range(1, 4):
        while sum(killer.kills.values()) < round_:
            assert killer.is_alive()
        killer.join(0.2)
        assert sum(killer.kills.values()) == round_
        killer.iteration_over()
    killer.stop()
    assert not killer.is_alive()


def test_a_soak_counts_iterations_kills_and_memory(rig):
    seen: list[int] = []
    taken = soak(rig, FakeDrill(), 0.02, 0, ("kill",), lambda taken: seen.append(taken.iterations))
    assert taken.lost == []
    assert seen == list(range(1, taken.iterations + 1))
    assert sum(taken.kills.values()) >= 1
    assert taken.kills.keys() == set(SERVICES)
    assert taken.start.host_slabs == taken.end.host_slabs == 4096
    assert all(taken.end.resident[name] > 0 for name in SERVICES)


def test_what_is_lost_is_kept_with_its_reason_and_the_next_run_is_a_new_one(rig):
    drill, told = FakeDrill(), []

    def fail():
        raise Aborted("gone twice", reason="SERVICE_FAILED_TWICE")

    def on_iteration(taken: Soak) -> None:
        told.append((taken.iterations, len(taken.lost), rig.iterations))
        rig.on_finish = {1: fail}.get(len(told), lambda: None)
        drill.wrong = "other weights" if len(told) == 2 else ""

    taken = soak(rig, drill, 0.02, 0, ("kill",), on_iteration)
    assert told[:4] == [(1, 0, 1), (1, 1, 3), (1, 2, 3), (2, 2, 1)]
    assert taken.lost[:2] == ["run, iteration 1: SERVICE_FAILED_TWICE: gone twice", "other weights"]


def test_resident_bytes_of_the_living_and_of_the_dead():
    assert resident_bytes(os.getpid()) > 1 << 20
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert resident_bytes(gone.pid) == 0
