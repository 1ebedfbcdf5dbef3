"""benchmarks/gpu/go.sh: a go outlives the call that began it, whatever a node does to what that call leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "gpu"
RUNS = 75


@pytest.fixture
def go(tmp_path):
    """go(SECONDS, *COMMAND) -> status, output: a call whose process group is killed when it has returned."""
    root = tmp_path / "root"
    (root / "benchmarks" / "gpu").mkdir(parents=True)
    shutil.copy(SCRIPTS / "go.sh", root / "benchmarks" / "gpu")

    def call(seconds: int, *command: str) -> tuple[int, str]:
        script = root / "benchmarks" / "gpu" / "go.sh"
        process = subprocess.Popen(["sh", str(script), str(tmp_path / "go"), str(seconds), *command],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        text, _ = process.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, text

    return call


def test_later_calls_see_the_end(go, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    assert go(0, "sh", "-c", f"echo begun; read line <{gate}; echo $line; exit 3")[0] == RUNS
    assert go(0)[0] == RUNS
    gate.write_text("through\n")
    status, text = go(30)
    assert (status, text.split()) == (3, ["begun", "through"])
    assert go(0) == (3, text), "and so does every call after it"


def test_a_go_runs_in_a_tree_of_its_own(go, tmp_path):
    assert go(30, "sh", "-c", "pwd; ls benchmarks/gpu")[1].split() == [str(tmp_path / "go" / "tree"), "go.sh"]


def test_a_killed_go_is_told(go, tmp_path):
    assert go(0, "sh", "-c", "sleep 1000")[0] == RUNS
    os.killpg(int((tmp_path / "go" / "begun").read_text()), signal.SIGKILL)
    status, text = go(50)
    assert status == 1 and "the go was killed" in text


def test_refusals(go):
    assert "no go was begun" in go(0)[1]
    assert go(50, "true")[0] == 0
    status, text = go(0, "true")
    assert status == 2 and "a go was begun there" in text
