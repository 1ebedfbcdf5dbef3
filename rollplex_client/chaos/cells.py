"""What is broken where: a cell is a process, a point in the code and an action. Cells come from the table of crash points."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollplex.core.crash_points import POINTS, SELF, Point
from rollplex.core.errors import BadInput

ROLES: Mapping[str, str] = {
    "keeper": "keeper", "broker": "broker", "trainer": "trainer-0", "rollout": "rollout-0", "reference": "reference-0",
    "reward": "reward", "coordinator": "coordinator"}
"""The one service of each role."""
SERVICES = tuple(ROLES.values())
ACTIONS = ("kill", "stop")

TWICE: Mapping[str, tuple[str, str]] = {
    "trainer-0": ("trainer.prefix.group", "trainer.attach.done"),
    "rollout-0": ("rollout.prefill.done", "rollout.decode.step"),
    "reference-0": ("reference.prefix.group", "reference.open.loaded"),
}
"""Where a service dies, and where its successor does while it does the same work again, before UPDATE_BEGIN: the iteration fails,
the next one does not."""

UNREACHED: Mapping[str, str] = {}
"""Points that the harness's mesh cannot reach, with the reason; any other that is not reached is an error."""


@dataclass(frozen=True, slots=True)
class Cell:
    point: str
    victim: str
    """A service."""
    action: str
    nth: int = 1
    then: str = ""
    """A second point, at which the victim is killed too; the iteration is to fail then."""

    @property
    def name(self) -> str:
        times = f"#{self.nth}" if self.nth > 1 else ""
        return f"{self.point}{times}:{self.action}:{self.victim}" + (f"+{self.then}" if self.then else "")

    @property
    def reacher(self) -> str:
        """The service that comes through the point."""
        return ROLES[POINTS[self.point].role]

    @property
    def opens(self) -> bool:
        """Whether it is a new run that leads to the point."""
        return POINTS[self.point].when == "open"

    def orders(self, pids: Mapping[str, int]) -> dict[str, tuple[int | str, str, int]]:
        """point -> (victim, action, nth), of everything that is armed for it."""
        victim: int | str = SELF if self.victim == self.reacher else pids[self.victim]
        armed: dict[str, tuple[int | str, str, int]] = {self.point: (victim, self.action, self.nth)}
        before = POINTS[self.point].when
        if before in POINTS:
            armed[before] = SELF, "kill", 1
        if self.then:
            armed[self.then] = SELF, "kill", 1
        return armed


def all_cells(actions: Sequence[str] = ACTIONS, points: Mapping[str, Point] = POINTS) -> Iterator[Cell]:
    """Every process at every point, and, at points that come several times, the process itself at each of them."""
    for action in actions:
        for name, point in points.items():
            yield from (Cell(name, victim, action) for victim in SERVICES)
            yield from (Cell(name, ROLES[point.role], action, nth) for nth in range(2, point.times + 1))
    if "kill" in actions:
        yield from (Cell(first, victim, "kill", then=second) for victim, (first, second) in TWICE.items())


def choose(*, actions: Sequence[str], processes: Sequence[str] = (), points: Sequence[str] = (), count: int | None = None,
           seed: int = 0) -> list[Cell]:
    """The cells of these victims and points (glob patterns; none: all), or `count` of them drawn by the seed, in table order.

    Raises BadInput for a name that nothing has.
    """
    for action in actions:
        if action not in ACTIONS:
            raise BadInput(f"no action {action!r}; there are {', '.join(ACTIONS)}", reason="UNKNOWN_ACTION")
    for process in processes:
        if process not in SERVICES:
            raise BadInput(f"the mesh of `rollplex chaos` has no {process!r}; it has {', '.join(SERVICES)}",
                           reason="NO_SUCH_SERVICE", service=process)
    for pattern in points:
        if not fnmatch.filter(POINTS, pattern):
            raise BadInput(f"no crash point is called {pattern!r}; `rollplex chaos --list` names all", reason="UNKNOWN_POINT")
    found = [cell for cell in all_cells(actions) if (not processes or cell.victim in processes)
             and (not points or any(fnmatch.fnmatch(cell.point, pattern) for pattern in points))]
    if count is None or count >= len(found):
        return found
    drawn = sorted(random.Random(seed).sample(range(len(found)), count))
    return [found[index] for index in drawn]
