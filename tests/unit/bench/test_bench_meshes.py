"""Which mesh measures which arm when one of them fails; meshes and arms are stand-ins."""

from __future__ import annotations

import argparse
import contextlib
from types import SimpleNamespace

import pytest

from rollplex.core.errors import InternalError
from rollplex_client.bench.arms import parse_arms
from rollplex_client.cli import bench_command


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """arms, arms that fail, whether meshes come up -> (arms of each mesh, result)"""

    def run(text: str, failing: tuple[str, ...] = (), *, up: bool = True):
        meshes: list[list[str]] = []

        @contextlib.contextmanager
        def bench_mesh(*arguments, **options):
            meshes.append([])
            if not up:
                raise InternalError("no mesh", reason="MESH_FAILED")
            yield meshes[-1]

        def run_arm(job, arm, mesh, settings, output):
            mesh.append(str(arm))
            if str(arm) in failing:
                raise InternalError("broken", reason="BROKEN")
            return SimpleNamespace(arm=arm)

        for name, stand_in in (("bench_mesh", bench_mesh), ("run_arm", run_arm), ("arm_settings", lambda *_: None),
                               ("check_updated", lambda run: None), ("check_same_job", lambda runs: None),
                               ("arm_result", lambda job, run, hardware: str(run.arm)), ("equation_rows", lambda runs: {})):
            monkeypatch.setattr(bench_command, name, stand_in)
        monkeypatch.setattr(bench_command, "health_display", lambda output: contextlib.nullcontext())
        result = {"arms": [], "failed": []}
        arguments = argparse.Namespace(runtime_dir=None, out=tmp_path, timeout=1.0)
        bench_command._run_arms(None, parse_arms(text, "cuda"), arguments, {}, result,
                                SimpleNamespace(note=lambda text: None))
        return meshes, result["arms"], [failed["what"] for failed in result["failed"]]

    return run


ARMS = "serial@mps-priority,overlap@mps-priority,overlap@mps-default"


def test_alike_arms_share_a_mesh(measured):
    assert measured(ARMS) == ([["serial@mps-priority", "overlap@mps-priority"], ["overlap@mps-default"]],
                              ["serial@mps-priority", "overlap@mps-priority", "overlap@mps-default"], [])


def test_the_arm_after_one_that_failed_has_a_new_mesh(measured):
    assert measured(ARMS, ("serial@mps-priority",)) == (
        [["serial@mps-priority"], ["overlap@mps-priority"], ["overlap@mps-default"]],
        ["overlap@mps-priority", "overlap@mps-default"], ["serial@mps-priority"])


def test_every_arm_of_a_mesh_that_cannot_come_up_has_failed(measured):
    meshes, done, failed = measured(ARMS, up=False)
    assert (len(meshes), done) == (3, [])
    assert failed == ["serial@mps-priority", "overlap@mps-priority", "overlap@mps-default"]
