"""Every crash point has a row and a call in its own role's sources; an order is carried out once, whoever reaches it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rollplex.core import crash_points
from rollplex.core.crash_points import POINTS, Order, arm, disarm, folder_from, process_state, reach
from rollplex.core.errors import BadInput

SOURCES = Path(crash_points.__file__).parents[1]
KEEPER = "broker/keeper.py"
SHARED = {"core/checkpoints.py": "coordinator"}
"""Modules outside the rooms, and the one role that comes through their points."""
REACHER = """
import sys
from pathlib import Path
from rollplex.core.crash_points import reach
for _ in range(int(sys.argv[2])):
    reach(Path(sys.argv[1]), "reward.score.computed")
    print("past", flush=True)
"""


def role_of(path: str) -> str:
    if path == KEEPER:
        return "keeper"
    return SHARED.get(path, path.partition("/")[0])


def calls() -> list[tuple[str, str]]:
    """(module, name) of every call; a name that is no literal is an error."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "crash_point":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: the name must be a literal"
                found.append((str(path.relative_to(SOURCES)), node.args[0].value))
    return found


def test_table_and_sources_agree():
    found = calls()
    assert {name for _, name in found} == POINTS.keys()
    assert {name: role_of(module) for module, name in found} == {name: point.role for name, point in POINTS.items()}
    assert [name for name, count in Counter(name for _, name in found).items() if count > 1] == []


def test_rows_say_what_the_world_is_and_what_leads_there():
    for name, point in POINTS.items():
        assert name.startswith(f"{point.role}.")
        assert point.times >= 1
        assert point.world
        assert point.when in ("iteration", "open") or POINTS[point.when].when == "iteration", name


def test_every_role_of_a_mesh_has_points():
    assert {point.role for point in POINTS.values()} == {
        "keeper", "broker", "trainer", "rollout", "reference", "reward", "coordinator"}


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def reacher(folder: Path, times: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", REACHER, str(folder), str(times)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_the_process_that_is_there_for_the_nth_time_is_killed_once(folder):
    arm(folder, "reward.score.computed", Order("a", "kill", nth=3))
    first = reacher(folder, 5)
    assert (first.communicate()[0].count("past"), first.returncode) == (2, -signal.SIGKILL)
    second = reacher(folder, 5)
    assert (second.communicate()[0].count("past"), second.returncode) == (5, 0)
    assert disarm(folder, "reward.score.computed")
    assert not disarm(folder, "reward.score.computed")


def test_counting_begins_with_the_order(folder):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        for token in ("a", "b"):
            arm(folder, "reward.score.computed", Order(token, "kill", (victim.pid,), nth=2))
            reach(folder, "reward.score.computed")
            assert victim.poll() is None, token
        reach(folder, "reward.score.computed")
        assert victim.wait(5) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()


def test_a_stopped_victim_is_stopped_before_its_killer_goes_on(folder):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        arm(folder, "reward.score.computed", Order("a", "stop", (victim.pid,)))
        assert reacher(folder, 1).communicate()[0] == "past\n"
        assert process_state(victim.pid) == "T"
    finally:
        victim.kill()
        victim.wait()
    assert process_state(victim.pid) == ""


def test_a_process_can_stop_itself_and_goes_on_when_continued(folder):
    arm(folder, "reward.score.computed", Order("a", "stop"))
    process = reacher(folder, 1)
    deadline = time.monotonic() + 20
    while process_state(process.pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[0] == "past\n"


def test_a_victim_that_is_gone_is_no_error(folder):
    gone = subprocess.Popen(["true"])
    gone.wait()
    arm(folder, "reward.score.computed", Order("a", "kill", (gone.pid,)))
    reach(folder, "reward.score.computed")
    assert disarm(folder, "reward.score.computed")


def test_unknown_names_and_actions_are_not_armed(folder):
    with pytest.raises(KeyError):
        arm(folder, "trainer.nowhere", Order("a", "kill"))
    with pytest.raises(KeyError):
        arm(folder, "reward.score.computed", Order("a", "explode"))
    assert list(folder.iterdir()) == []


def test_only_a_directory_of_ones_own_arms_anything(tmp_path, folder):
    assert folder_from(None) is None
    assert folder_from(str(folder)) == folder
    wide, link, file = tmp_path / "wide", tmp_path / "link", tmp_path / "file"
    wide.mkdir(mode=0o750)
    link.symlink_to(folder)
    file.touch(mode=0o700)
    for path in (wide, link, file, tmp_path / "none"):
        with pytest.raises(BadInput) as refused:
            folder_from(str(path))
        assert refused.value.reason == "CRASH_POINTS_FOLDER"


def test_nothing_is_armed_here():
    assert crash_points._folder is None
