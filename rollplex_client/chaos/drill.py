"""Cells carried out on a rig, one after the other, each judged: survived, not reached or failed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollplex.core.crash_points import POINTS, process_state
from rollplex.core.errors import RollplexError
from rollplex_client.chaos import leaks
from rollplex_client.chaos.cells import UNREACHED, Cell
from rollplex_client.chaos.rig import POLL_S, Ended, Rig
from rollplex_client.cli.watchdog import CONTINUED
from rollplex_client.results import IterationHandle

REFERENCE_ITERATIONS = 12
"""Of the unfaulted run; a run with faults is as long at most."""
REPLACED_TIMEOUT_S = 20.0
"""How long the watchdog may take to end what was stopped."""
LEAK_TIMEOUT_S = 10.0
"""How long what fades by itself (connections, sessions that are buried) may take."""

POOL_THREADS = Counter({Path(sys.executable).name[:15]: min(32, (os.cpu_count() or 1) + 4)})
"""asyncio's own pool starts threads when work comes together, up to so many, and keeps them."""


class Outcome(StrEnum):
    SURVIVED = "survived"
    UNREACHED = "not reached"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    cell: Cell
    outcome: Outcome
    seconds: float
    reason: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome is Outcome.FAILED or (self.outcome is Outcome.UNREACHED and self.cell.point not in UNREACHED)


class Drill:
    """`reference` first; then `run` a cell at a time."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.expected: list[Ended] = []
        self.baseline = leaks.Snapshot({})

    def reference(self, iterations: int = REFERENCE_ITERATIONS) -> None:
        """The unfaulted run, and what an idle mesh holds after it."""
        self.rig.new_run()
        for number in range(iterations):
            self.rig.finish(self.rig.submit())
            self.expected.append(self.rig.ended(number))
        self.baseline = self.rig.counts(self.rig.wait_whole())

    def run(self, cell: Cell) -> Verdict:
        """Never raises RollplexError: it is the verdict's reason."""
        began = time.monotonic()
        try:
            outcome, reason = self._carry_out(cell)
        except RollplexError as error:
            outcome, reason = Outcome.FAILED, f"{error.reason}: {error}"
        finally:
            for point in POINTS:
                self.rig.disarm(point)
        if outcome is Outcome.FAILED:
            # The run may be spoilt: what comes next does not stand on it.
            self.rig.iterations = len(self.expected)
        return Verdict(cell, outcome, time.monotonic() - began, reason)

    def _carry_out(self, cell: Cell) -> tuple[Outcome, str]:
        rig = self.rig
        pids = rig.wait_whole()
        if not cell.opens and (not rig.run or rig.iterations >= len(self.expected)):
            rig.new_run()
        orders = cell.orders(pids)
        for point, (victim, action, nth) in orders.items():
            rig.arm(point, action, victim, nth)
        if cell.opens:
            rig.new_run()
        failure = self._iterate(cell)
        if failure:
            return Outcome.FAILED, failure
        unreached = [point for point in orders if not rig.disarm(point)]
        if unreached:
            return Outcome.UNREACHED, ", ".join(unreached)
        lives_on = cell.action == "stop" and cell.victim in CONTINUED
        now = self._settled(cell.victim, pids[cell.victim], lives_on)
        if not lives_on and now[cell.victim] == pids[cell.victim]:
            return Outcome.FAILED, f"{cell.victim} is still process {pids[cell.victim]}"
        if lives_on and process_state(now[cell.victim]) == "T":
            return Outcome.FAILED, f"{cell.victim} is still stopped"
        may_die = self._may_die(cell) - ({cell.victim} if lives_on else set())
        bystanders = [name for name, pid in pids.items() if now[name] != pid and name not in may_die]
        if bystanders:
            return Outcome.FAILED, f"also restarted: {', '.join(bystanders)}"
        leaked = self.leaks(now)
        return (Outcome.FAILED, "; ".join(leaked)) if leaked else (Outcome.SURVIVED, "")

    def _settled(self, victim: str, former: int, lives_on: bool) -> dict[str, int]:
        """The whole mesh's pids, with the victim replaced or, where it `lives_on`, continued. One that was stopped as the
        iteration ended is noticed later than that."""
        deadline = time.monotonic() + REPLACED_TIMEOUT_S
        while True:
            now = self.rig.wait_whole()
            settled = process_state(former) != "T" if lives_on else now[victim] != former
            if settled or time.monotonic() >= deadline:
                return now
            time.sleep(POLL_S)

    @staticmethod
    def _may_die(cell: Cell) -> set[str]:
        before = POINTS[cell.point].when
        return {cell.victim, *([Cell(before, "", "kill").reacher] if before in POINTS else [])}

    def _iterate(self, cell: Cell) -> str:
        """Runs the iteration, and the next one where the first is to fail; what is wrong with it."""
        rig = self.rig
        number = rig.iterations
        handle = rig.submit()
        if cell.then:
            try:
                rig.finish(handle)
            except RollplexError as error:
                if cell.victim not in str(error):
                    return f"the error of an iteration that was to fail does not name {cell.victim}: {error.reason}: {error}"
            else:
                return f"the iteration was to fail: {cell.victim} died twice"
            rig.wait_whole()
            # The failed one has used up its number and its prompts' ordinals: its successor is no iteration of the reference.
            rig.finish(rig.submit())
            rig.iterations = len(self.expected)
            return ""
        rig.finish(handle)
        return self.compare(handle, number)

    def compare(self, handle: IterationHandle, number: int) -> str:
        """How the iteration's end differs from the unfaulted run's; empty when it does not."""
        found, wanted = self.rig.ended(number), self.expected[number]
        if found.weights != wanted.weights:
            return f"{handle.run}, iteration {number}: the snapshot is not the unfaulted run's"
        differing = [name for name in found.checkpoint if found.checkpoint[name] != wanted.checkpoint.get(name)]
        return f"{handle.run}, iteration {number}: the checkpoint's {', '.join(differing)} differ" if differing else ""

    def leaks(self, pids: Mapping[str, int]) -> list[str]:
        """What is there that was not there on the idle mesh; successors of processes are compared with these."""
        before = leaks.Snapshot({
            name: dataclasses.replace(counts, pid=pids[name], threads=counts.threads + POOL_THREADS)
            for name, counts in self.baseline.processes.items()}, self.baseline.custody)
        deadline = time.monotonic() + LEAK_TIMEOUT_S
        while (found := leaks.difference(before, self.rig.counts(pids))) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found


def carry_out(rig: Rig, drill: Drill, cells: Sequence[Cell], on_verdict: Callable[[Verdict, dict[str, str]], None]
              ) -> list[Verdict]:
    """All cells; a mesh that does not come back after one is started anew. `on_verdict` gets a failed one with the logs' ends."""
    verdicts = []
    for cell in cells:
        verdict = drill.run(cell)
        verdicts.append(verdict)
        on_verdict(verdict, rig.log_ends() if verdict.bad else {})
        if verdict.outcome is Outcome.FAILED:
            try:
                rig.wait_whole()
            except RollplexError:
                with contextlib.suppress(RollplexError):
                    rig.close()
                rig.start()
    return verdicts

