"""`rollplex layout`, `rollplex plan`, and the check before a mesh starts."""

from __future__ import annotations

import json

import pytest

from rollplex.core.errors import OutOfMemory
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import AUTO, KNOWN
from rollplex.core.memory_sizes import PLAN_SCHEDULES
from rollplex.core.model_layout import TRAIN_LAYOUTS
from rollplex_client.cli import arguments as options
from rollplex_client.cli import main
from rollplex_client.cli.fit import check_fits
from rollplex_client.cli.published import PUBLISHED
from rollplex_client.cli.settings import parse_settings

SHAPE = ["--model", "Qwen2.5-VL-32B", "--train-tp", "8", "--rollout-tp", "4"]


def run(capsys, *argv: str) -> tuple[int, dict]:
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_options_are_the_planners():
    """arguments.py imports nothing, so that --help is instant."""
    assert options.TRAIN_LAYOUTS == TRAIN_LAYOUTS and options.SCHEDULES == PLAN_SCHEDULES
    for name, values in KNOWN.items():
        for value in (AUTO, *values):
            parsed = options.build_parser().parse_args(["plan", *SHAPE, f"--{name.replace('_', '-')}", value])
            assert getattr(parsed, name) == value


def test_layout_of_32b(capsys):
    status, found = run(capsys, "layout", *SHAPE, "--train-layout", "megatron-fused")
    assert status == 0 and round(found["rebuilt_bytes_per_gpu"] / 2**30, 1) == 1.1
    shares = [round(100 * found["language_model"][case]["share"], 1) for case in ("identical", "transposed", "incompatible")]
    assert shares == [60.1, 32.8, 7.2]
    assert found["vision_tower"]["parameters"] == 688_841_984
    status, found = run(capsys, "layout", *SHAPE)
    assert (status, found["rebuilt_bytes_per_gpu"]) == (0, 0)


def test_layout_for_people(capsys):
    assert main(["layout", *SHAPE, "--train-layout", "megatron-fused"]) == 0
    text = capsys.readouterr().out
    for words in ("19.68 B", "10.74 B", "2.35 B", "vision tower", "reconstruction buffer per GPU: 1.1 GiB"):
        assert words in text


def test_plan_fits_or_fails_by_status(capsys):
    status, found = run(capsys, "plan", *SHAPE, "--host-gib", "1400")
    assert status == 0 and found["fits"] and found["change"] == []
    assert {"OVERLAP", "SUFFIX", "PREFIX BACKWARD", "UPDATE"} == set(found["phases"])
    status, found = run(capsys, "plan", *SHAPE, "--host-gib", "100")
    assert status == 1 and not found["fits"] and found["host_over_bytes"] > 0 and found["change"]


def test_plan_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", *SHAPE, "--host-gib", "1400"]) == 0
    text = capsys.readouterr().out
    for words in ("gradient buffer", "tower", "optimizer_state", "32.5 B", "counted: 32.76 B", "fits: peak", "UPDATE"):
        assert words in text


@pytest.mark.parametrize(("extra", "status"), [(["--gpus", "6"], 2), (["--rollout-tp", "3"], 2), (["--groups", "0"], 2)])
def test_wrong_numbers_are_usage_errors(extra, status, capsys):
    assert main(["plan", *SHAPE, *extra, "--host-gib", "1"]) == status
    assert capsys.readouterr().err.startswith("error: ")


def settings(tmp_path, limit: int | None, **run_options):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "model.safetensors"):
        (folder / name).touch()
    broker = {} if limit is None else {"host_limit_bytes": limit}
    return parse_settings({"mesh": {"runtime_dir": str(tmp_path / "rt")}, "model": {"checkpoint": str(folder)},
                           "broker": broker, "run": run_options})


def test_up_refuses_what_cannot_fit(tmp_path, capsys):
    with pytest.raises(OutOfMemory, match="the mesh cannot fit: weights and training state take 70") as raised:
        check_fits(settings(tmp_path, 60 << 30).sections)
    assert "optimizer_state" in str(raised.value) and raised.value.reason == "MESH_CANNOT_FIT"
    argv = ["up", "--model", str(tmp_path / "model"), "--runtime-dir", str(tmp_path / "rt"), "--set"]
    status, found = run(capsys, *argv, "broker.host_limit_bytes=1000000")
    assert (status, found["error"]["reason"]) == (1, "MESH_CANNOT_FIT")
    assert not (tmp_path / "rt").exists()


def test_what_the_run_leaves_out_is_not_counted(tmp_path):
    frozen = {"optimizer": {"vision_learning_rate": 0.0, "freeze_decoder": True}}
    plan = check_fits(settings(tmp_path, 20 << 30, **frozen).sections)
    assert set(plan.host) == {"media"}
    with pytest.raises(OutOfMemory, match="reference_weights"):
        check_fits(settings(tmp_path, 20 << 30, loss={"kl_coef": 0.1}, **frozen).sections)
    with pytest.raises(OutOfMemory, match="pinned_pool"):
        check_fits(settings(tmp_path, 1 << 30, saved_activations="offload", **frozen).sections)
    assert check_fits(settings(tmp_path, 0).sections).fits


def test_the_limit_is_the_containers(tmp_path):
    assert 0 < default_host_limit_bytes() < 1 << 50
