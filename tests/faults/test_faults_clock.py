"""The wall clock jumps, back before everything and far ahead: it dates records, and decides nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faulty_mesh import PROMPTS, iteration_of, until
from runs import weights_of

ROOT = Path(__file__).parents[2]
DAY_S = 86400.0

DATES = {
    "services/rollplex/coordinator/checkpoints.py": 2,
    "services/rollplex/coordinator/engine.py": 2,
    "services/rollplex/coordinator/events.py": 1,
    "services/rollplex/coordinator/jobs.py": 1,
    # An engine that knows a later epoch says so, and the next one is above it.
    "services/rollplex/coordinator/peers.py": 1,
    # How long nobody was there, in the timeline of an iteration that goes on.
    "services/rollplex/coordinator/takeover.py": 1,
}
"""Where the services and the client may read the wall clock, and how often: what they read is kept and shown."""


def wall_clock_reads(source: str) -> int:
    """Calls of time.time, time.time_ns and datetime.now, under any alias of the module."""
    clocks = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    return sum(1 for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
               and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in clocks)


def test_nothing_new_reads_the_wall_clock():
    found = {}
    for folder in ("services/rollplex", "rollplex_client"):
        for path in (ROOT / folder).rglob("*.py"):
            if count := wall_clock_reads(path.read_text()):
                found[str(path.relative_to(ROOT))] = count
    running = {path: count for path, count in found.items() if "/demo/" not in path and "/bench/" not in path}
    assert {path: count for path, count in running.items() if path.startswith("services/")} == DATES
    assert {path for path in running if path.startswith("rollplex_client/")} <= {"rollplex_client/cli/logs_command.py"}


@pytest.fixture
def wrong_clock(mesh):
    """wrong_clock(seconds): by which the wall clock of every service is off from now on."""
    def off(seconds):
        replacement = mesh.clock.with_suffix(".new")
        replacement.write_text(str(seconds))
        replacement.rename(mesh.clock)

    yield off
    mesh.clock.unlink(missing_ok=True)


def train(mesh, client, tmp_path, between=lambda: None):
    run = mesh.new_run(client)
    assert client.wait(client.submit_iteration(run, PROMPTS[:2])).state == "done"
    between()
    assert client.wait(client.submit_iteration(run, PROMPTS[2:4])).state == "done"
    return run, {name: weight.tobytes() for name, weight in weights_of(client, run, tmp_path).items()}


@pytest.mark.slow
def test_jumps_while_an_iteration_runs(mesh, client, wrong_clock, tmp_path):
    _, expected = train(mesh, client, tmp_path / "plain")
    run = mesh.new_run(client)
    for number, seconds in enumerate((-3650 * DAY_S, 3650 * DAY_S)):
        with mesh.reward.held():
            handle = client.submit_iteration(run, PROMPTS[2 * number:2 * number + 2])
            until(lambda: mesh.reward.asked, "the reward is asked")
            wrong_clock(seconds)
        assert client.wait(handle).state == "done"
        wrong_clock(0)
    first, second = (iteration_of(client, run, number) for number in (0, 1))
    assert first.end_time < first.create_time < second.end_time, "the clock was not moved"
    assert {name: weight.tobytes() for name, weight in weights_of(client, run, tmp_path / "moved").items()} == expected


@pytest.mark.slow
def test_a_coordinator_that_starts_ten_years_before_its_predecessor(mesh, client, wrong_clock, tmp_path):
    """Its group epochs begin below those in which the engines are, its run and rewards are those of the journal."""
    _, expected = train(mesh, client, tmp_path / "plain")

    def restart():
        wrong_clock(-3650 * DAY_S)
        mesh.kill("coordinator")
        mesh.start("coordinator")

    run, found = train(mesh, client, tmp_path / "back", restart)
    assert found == expected
    second = iteration_of(client, run, 1)
    assert second.create_time < iteration_of(client, run, 0).create_time
