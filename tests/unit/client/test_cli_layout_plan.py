"""`rollplex layout`, `rollplex plan`, and the check before a mesh starts."""

from __future__ import annotations

import json
import tomllib

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


def test_plan_as_toml_is_a_configuration(tmp_path, capsys):
    shape = ["--model", "Qwen2.5-VL-7B", "--train-tp", "1", "--rollout-tp", "1", "--gpus", "1", "--hbm-gib", "139",
             "--groups", "16", "--prompt-tokens", "4096", "--response-tokens", "1024", "--host-gib", "105", "--toml"]
    assert main(["plan", *shape]) == 0
    keys = tomllib.loads(capsys.readouterr().out)
    sections = parse_settings({"mesh": {"runtime_dir": str(tmp_path)} | keys.pop("mesh"), **keys}).sections
    assert sections["mesh"].hbm_budget_gib == 139 and sections["trainer"].gradients == "hbm"
    assert sections["reference"].weights == "resident", "93 GiB of state leave no host memory for weights"
    assert sections["rollout"].vllm.kv_cache_gib > 1 and sections["trainer"].hbm_share_gib > sections["rollout"].hbm_share_gib
    status, found = run(capsys, "plan", *shape)
    assert (status, found["reference"]["weights"]) == (0, "resident")
    assert main(["plan", *shape, "--hbm-gib", "30"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "does not fit" in shown.err
    for extra in (["--moments", "bfloat16"], ["--reference", "re-read"]):
        assert main(["plan", *shape, *extra]) == 2


@pytest.mark.parametrize("name", options.ABLATIONS)
def test_plan_shows_what_an_ablation_adds(name, capsys):
    shape = [*SHAPE, "--host-gib", "3000"]
    _, full = run(capsys, "plan", *shape)
    _, ablated = run(capsys, "plan", *shape, "--ablate", name)
    totals = [max(phase["total_bytes"] for phase in found["phases"].values()) for found in (full, ablated)]
    assert totals[0] < totals[1]


def settings(tmp_path, limit: int | None, *, given: dict | None = None, **run_options):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "model.safetensors"):
        (folder / name).touch()
    broker = {} if limit is None else {"host_limit_bytes": limit}
    base = {"mesh": {"runtime_dir": str(tmp_path / "rt")}, "model": {"checkpoint": str(folder)}, "broker": broker,
            "run": run_options}
    return parse_settings({name: base.get(name, {}) | (given or {}).get(name, {}) for name in {**base, **(given or {})}})


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


def refused(tmp_path, budget_gib, given, **run_options) -> str:
    mesh = {"devices": "cuda", "hbm_budget_gib": budget_gib} | given.pop("mesh", {})
    with pytest.raises(OutOfMemory) as caught:
        check_fits(settings(tmp_path, 0, given={"mesh": mesh, "model": {"dtype": "bfloat16"}} | {
            name: value for name, value in given.items() if name != "model"}, **run_options).sections)
    assert caught.value.reason == "MESH_CANNOT_FIT"
    return str(caught.value)


def test_up_refuses_a_device_that_cannot_hold_it_and_says_what_to_change(tmp_path):
    """3B in bfloat16: 7 GiB of weights, 15 GiB of gradients, 4 GiB for the runtime."""
    kl = {"loss": {"kl_coef": 0.1}}
    fits = {"mesh": {"devices": "cuda", "hbm_budget_gib": 34.0}, "model": {"dtype": "bfloat16"}}
    base = settings(tmp_path, 0, given=fits, **kl).sections
    assert base["model"].dtype == "float32" or check_fits(base).fits
    text = refused(tmp_path, 20.0, {}, **kl)
    assert "gradients" in text and 'change trainer.gradients = "host"' in text and "change mesh.hbm_budget_gib = " in text
    text = refused(tmp_path, 34.0, {"rollout": {"engine": "vllm", "vllm": {"kv_cache_gib": 30.0}}}, **kl)
    assert "OVERLAP takes" in text and "rollout_kv" in text and "change rollout.vllm.kv_cache_gib = " in text


@pytest.mark.parametrize("name", options.ABLATIONS)
def test_up_refuses_each_ablation_under_a_budget_that_full_rollplex_keeps(tmp_path, name):
    given = {"mesh": {"devices": "cuda", "hbm_budget_gib": 32.0}, "model": {"dtype": "bfloat16"},
             "rollout": {"engine": "vllm", "vllm": {"kv_cache_gib": 12.0}}}
    assert not check_fits(settings(tmp_path, 0, given=given).sections).hbm_over
    text = refused(tmp_path, 32.0, {"rollout": given["rollout"]}, ablation={name: True})
    assert f"change run.ablation.{name} = false" in text
