"""Cells from the table, drawn by a seed, and how a drill judges them: with a rig that only says what it is told to."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rollplex.core.crash_points import POINTS, SELF
from rollplex.core.errors import Aborted, BadInput, Unavailable
from rollplex_client.chaos import drill as drills
from rollplex_client.chaos.cells import ROLES, SERVICES, TWICE, UNREACHED, Cell, all_cells, choose
from rollplex_client.chaos.drill import Drill, Outcome, Verdict, carry_out
from rollplex_client.chaos.leaks import ProcessCounts, Snapshot
from rollplex_client.chaos.rig import Ended
from rollplex_client.results import IterationHandle

CELL = Cell("trainer.suffix.group", "trainer-0", "kill")


def test_every_process_meets_every_point_and_itself_each_time():
    for action in ("kill", "stop"):
        found = {(cell.point, cell.victim, cell.nth) for cell in all_cells((action,))}
        assert found >= {(point, victim, 1) for point in POINTS for victim in SERVICES}
        assert found >= {(name, ROLES[point.role], nth) for name, point in POINTS.items() for nth in range(1, point.times + 1)}
    names = Counter(cell.name for cell in all_cells())
    assert [name for name, count in names.items() if count > 1] == []


def test_who_dies_twice_does_so_before_update_begin():
    twice = [cell for cell in all_cells() if cell.then]
    assert {cell.victim for cell in twice} == TWICE.keys()
    for cell in twice:
        assert {POINTS[cell.point].role, POINTS[cell.then].role} == {cell.victim.rpartition("-")[0]}
        assert set(cell.orders({})) == {cell.point, cell.then}


def test_exceptions_are_points_with_reasons():
    assert UNREACHED.keys() <= POINTS.keys()
    assert all(UNREACHED.values())


def test_a_draw_is_the_seeds():
    first, again, other = (choose(actions=("kill",), count=30, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 30
    assert choose(actions=("kill",)) == list(all_cells(("kill",)))


def test_choices_narrow():
    found = choose(actions=("stop",), processes=("keeper", "reward"), points=("trainer.update.*", "keeper.put.stored"))
    assert {cell.victim for cell in found} == {"keeper", "reward"}
    assert {cell.point.rpartition(".")[0] for cell in found} == {"trainer.update", "keeper.put"}
    assert {cell.action for cell in found} == {"stop"}


@pytest.mark.parametrize("wrong", [{"actions": ("explode",)}, {"actions": ("kill",), "processes": ("trainer",)},
                                   {"actions": ("kill",), "points": ("trainer.nowhere",)}])
def test_what_nothing_is_called_is_refused(wrong):
    with pytest.raises(BadInput):
        choose(**wrong)


def test_orders_name_others_by_pid_and_what_must_come_before():
    pids = {"keeper": 7}
    assert CELL.orders(pids) == {CELL.point: (SELF, "kill", 1)}
    assert Cell(CELL.point, "keeper", "stop", 2).orders(pids) == {CELL.point: (7, "stop", 2)}
    attach = Cell("trainer.attach.done", "keeper", "kill")
    assert attach.orders(pids) == {attach.point: (7, "kill", 1), POINTS[attach.point].when: (SELF, "kill", 1)}


class FakeRig:
    """Three iterations whose weights are their numbers. Fields are what a test turns wrong."""

    def __init__(self) -> None:
        self.run, self.iterations, self.armed, self.log = "", 0, {}, []
        self.running = {name: index for index, name in enumerate(SERVICES, start=100)}
        self.replaced, self.reached, self.weights, self.sockets = {"trainer-0"}, True, None, 3
        self.files: dict[str, str] = {}
        self.error = self.lost = None

    def new_run(self):
        self.run, self.iterations = f"run-{len(self.log)}", 0
        self.log.append("new run")

    def wait_whole(self):
        if self.lost:
            raise self.lost
        return dict(self.running)

    def arm(self, point, action, victim, nth):
        self.armed[point] = action, victim, nth

    def disarm(self, point):
        return self.armed.pop(point, None) is not None and self.reached

    def submit(self):
        self.iterations += 1
        return IterationHandle(self.run, self.iterations - 1, False, 0)

    def finish(self, handle):
        if self.armed:
            for name in self.replaced:
                self.running[name] += 1000
        error, self.error = self.error, None
        if error and self.armed:
            raise error

    def ended(self, number):
        return Ended(str(number) if self.weights is None else self.weights, self.files)

    def counts(self, pids):
        held = Counter(socket=self.sockets), Counter(), Counter()
        return Snapshot({name: ProcessCounts(pid, *held) for name, pid in pids.items()})

    def log_ends(self):
        return {"trainer-0": "last words"}

    def close(self):
        self.log.append("closed")

    def start(self):
        self.log.append("started")
        self.lost = None


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(drills, "LEAK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(drills, "REPLACED_TIMEOUT_S", 0.0)
    return FakeRig()


@pytest.fixture
def drill(rig):
    drill = Drill(rig)
    drill.reference(3)
    return drill


def test_a_cell_is_survived_when_all_is_as_it_was(rig, drill):
    verdict = drill.run(CELL)
    assert (verdict.outcome, verdict.reason, verdict.bad) == (Outcome.SURVIVED, "", False)
    assert rig.armed == {}


def test_a_run_is_as_long_as_the_reference(rig, drill):
    for _ in range(4):
        drill.run(CELL)
    assert rig.log == ["new run"] * 3  # the reference, three cells, one more


@pytest.mark.parametrize(("turn", "reason"), [
    ({"weights": "others"}, "not the unfaulted run's"),
    ({"files": {"exp_avg.safetensors": "other"}}, "exp_avg.safetensors differ"),
    ({"replaced": set()}, "still process"),
    ({"replaced": {"trainer-0", "broker"}}, "also restarted: broker"),
    ({"sockets": 4}, "descriptors of socket: 3 -> 4"),
    ({"error": Unavailable("gone", reason="ENGINE_UNREACHABLE")}, "ENGINE_UNREACHABLE: gone"),
    ({"lost": Unavailable("rollout-0", reason="MESH_NOT_WHOLE")}, "MESH_NOT_WHOLE"),
])
def test_what_is_wrong_is_said(rig, drill, turn, reason):
    for name, value in turn.items():
        setattr(rig, name, value)
    verdict = drill.run(CELL)
    assert (verdict.outcome, verdict.bad) == (Outcome.FAILED, True)
    assert reason in verdict.reason


def test_who_is_stopped_late_is_waited_for(rig, drill, monkeypatch):
    monkeypatch.setattr(drills, "REPLACED_TIMEOUT_S", 20.0)
    rig.replaced, looks = set(), []
    whole = rig.wait_whole

    def replaced_at_the_third_look():
        looks.append(rig.iterations)
        if len(looks) == 4:  # the first is before the cell
            rig.running["trainer-0"] += 1
        return whole()

    rig.wait_whole = replaced_at_the_third_look
    assert drill.run(CELL).outcome is Outcome.SURVIVED
    assert len(looks) == 4


@pytest.mark.parametrize(("replaced", "state", "reason"), [
    (set(), "S", ""), (set(), "T", "keeper is still stopped"), ({"keeper"}, "S", "also restarted: keeper")])
def test_a_stopped_keeper_is_to_go_on(rig, drill, monkeypatch, replaced, state, reason):
    monkeypatch.setattr(drills, "process_state", lambda pid: state)
    rig.replaced = replaced
    verdict = drill.run(Cell(CELL.point, "keeper", "stop"))
    assert (verdict.outcome is Outcome.SURVIVED, verdict.reason) == (not reason, reason)


def test_after_a_failure_the_next_cell_has_a_run_of_its_own(rig, drill):
    drill.run(CELL)
    rig.weights = "others"
    drill.run(CELL)
    rig.weights = None
    assert drill.run(CELL).outcome is Outcome.SURVIVED
    assert rig.log.count("new run") == 3


def test_a_point_that_is_not_reached_is_an_error_unless_it_is_listed(rig, drill, monkeypatch):
    rig.reached = False
    verdict = drill.run(CELL)
    assert (verdict.outcome, verdict.reason, verdict.bad) == (Outcome.UNREACHED, CELL.point, True)
    monkeypatch.setattr(drills, "UNREACHED", {CELL.point: "a reason"})
    assert not verdict.bad


def test_dying_twice_must_fail_the_iteration_with_the_services_name(rig, drill):
    cell = Cell("trainer.prefix.group", "trainer-0", "kill", then="trainer.suffix.group")
    assert "was to fail" in drill.run(cell).reason
    rig.error = Aborted("somebody failed", reason="SERVICE_FAILED_TWICE")
    assert "does not name trainer-0" in drill.run(cell).reason
    rig.error = Aborted("trainer-0 failed twice in a row", reason="SERVICE_FAILED_TWICE")
    assert drill.run(cell).outcome is Outcome.SURVIVED


def test_a_mesh_that_does_not_come_back_is_started_anew(rig, drill):
    told: list[tuple[Verdict, dict[str, str]]] = []
    rig.lost = Unavailable("rollout-0", reason="MESH_NOT_WHOLE")
    verdicts = carry_out(rig, drill, [CELL, dataclasses.replace(CELL, nth=2)], lambda *both: told.append(both))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.FAILED, Outcome.SURVIVED]
    assert rig.log[-3:] == ["closed", "started", "new run"]
    assert [logs for _, logs in told] == [{"trainer-0": "last words"}, {}]
