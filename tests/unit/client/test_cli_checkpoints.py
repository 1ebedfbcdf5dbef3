"""`rollplex checkpoint`: what lies in a folder, and whether it is intact; no mesh, no coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex.core import checkpoints
from rollplex.core.checkpoints import Manifest
from rollplex_client.cli import main


@pytest.fixture
def root(tmp_path) -> Path:
    """Two checkpoints of run `a`, one of `b`."""
    for run, number in (("a", 1), ("a", 2), ("b", 7)):
        path = tmp_path / "rt" / "checkpoints" / run / checkpoints.folder_name(number)
        partial = checkpoints.partial_of(path)
        partial.mkdir(parents=True)
        (partial / "master.safetensors").write_bytes(bytes(1000))
        checkpoints.commit(partial, path, Manifest(
            run=run, next_iteration=number, next_validation=0, snapshot=number, optimizer_step=number,
            prompts_consumed=8 * number, learning_rate_factor=1.0, seed=0, config={}, dtype="float32", state_dtype="float32",
            layout_digest="d", tensor_parallel=1, create_time_s=0.0))
    return tmp_path / "rt"


def run(capsys, root, *arguments) -> tuple[int, dict]:
    status = main(["--json", "--runtime-dir", str(root), "checkpoint", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_list(capsys, root):
    status, found = run(capsys, root, "list")
    assert (status, [(item["run"], item["next_iteration"], item["size_bytes"]) for item in found["checkpoints"]]) == (
        0, [("a", 2, 1000), ("a", 1, 1000), ("b", 7, 1000)])
    assert [item["run"] for item in run(capsys, root, "list", "b")[1]["checkpoints"]] == ["b"]
    (root / "checkpoints/a/iteration-000002/manifest.json").unlink()
    _, found = run(capsys, root, "list", "a")
    assert ["manifest.json" in item["error"] for item in found["checkpoints"]] == [True, False]
    assert run(capsys, root / "none", "list") == (0, {"checkpoints": []})


def test_verify(capsys, root):
    path = root / "checkpoints/a/iteration-000002"
    status, found = run(capsys, root, "verify", path)
    assert (status, found["prompts_consumed"], found["files"]) == (0, 16, 1)
    (path / "master.safetensors").write_bytes(bytes(999) + b"\1")
    status, found = run(capsys, root, "verify", path)
    assert (status, found["error"]["reason"], found["error"]["metadata"]["file"]) == (
        1, "CHECKPOINT_CORRUPT", "master.safetensors")


def test_people_get_a_table_and_a_sentence(capsys, root):
    assert main(["--runtime-dir", str(root), "checkpoint", "list"]) == 0
    assert "iteration-000007" in capsys.readouterr().out.replace("\n", "")
    assert main(["checkpoint", "verify", str(root / "checkpoints/b/iteration-000007")]) == 0
    assert "is intact: 1 files" in capsys.readouterr().out.replace("\n", " ")
