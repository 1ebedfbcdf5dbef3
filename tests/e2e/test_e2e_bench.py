"""`rollplex bench` as a user tries it before a GPU sees it: real processes, a tiny model, arms and TRL."""

from __future__ import annotations

import json

import pytest
from cli_rig import Cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a busy machine takes its time

SMALL = ("--shape", "tiny", "--device", "cpu", "--prompt-tokens", 160, "--groups", 2, "--samples", 2, "--response-tokens", 6,
         "--max-response-tokens", 12, "--iterations", 2)


@pytest.fixture
def cli():
    # No --runtime-dir: every mesh makes one of its own.
    with Cli(runtime_dir=None, env={"OMP_NUM_THREADS": "1"}, timeout_s=500.0) as cli:
        yield cli


def test_arms_do_one_job_and_are_set_against_bounds_and_equation_1(cli):
    result = cli("bench", *SMALL, "--work", "data", "--out", "out").result
    serial, overlap = result["arms"]
    assert (serial["arm"], overlap["arm"]) == ("serial@time-slice", "overlap@time-slice")
    assert result["failed"] == []
    assert result["job"]["prompt_tokens"] == 160
    assert [arm["metrics"][1]["prompt_length/mean"] for arm in (serial, overlap)] == [160, 160]
    for arm in (serial, overlap):
        # The lengths of the samples' seeds, whatever the tokens were.
        assert [arm["metrics"][index]["actor/token_count"] for index in range(2)] == result["job"]["response_tokens"]
        assert arm["metrics"][0]["frac_reward_zero_std"] < 1
        assert arm["metrics"][0]["grad_norm"] > 0
        assert arm["decode"]["per_sample_distance_measured"] > 1
        assert arm["prefix"]["trainer"]["distance_measured"] > 1
        assert 0 < arm["mfu"]["of_measured"] < 1
        assert len(arm["walls_s"]) == 1
        assert arm["hbm_peak_bytes"]["host:0"]["actor_snapshot"] > 0
        # Spans outside and inside of OVERLAP, relative to the iteration's beginning.
        spans = {name: (start_s, duration_s) for name, start_s, duration_s in arm["spans"]}
        assert {"ready", "overlap", "generate", "trainer_prefix", "release", "suffix", "leave", "update", "gradient_norm",
                "write", "bind"} <= set(spans)
        assert spans["ready"][0] <= spans["overlap"][0] <= spans["suffix"][0] <= spans["update"][0]
        assert spans["update"][0] + spans["update"][1] <= arm["steps_s"][-1]
    equation = result["equation"]["overlap@time-slice"]
    assert equation["predicted_s"] == pytest.approx(max(equation["decode_s"], equation["prefix_s"]) + equation["post_s"])
    kept = json.loads((cli.folder / "out" / "bench.json").read_text())
    assert kept["arms"] == result["arms"]
    assert "serial@time-slice" in (cli.folder / "out" / "report.html").read_text()
    assert (cli.folder / "out" / "logs" / "serial@time-slice+overlap@time-slice" / "coordinator.log").is_file()
    # One mesh for both: the second arm waits for a run only.
    assert serial["start_s"] > overlap["start_s"]


@pytest.mark.ranks
def test_arms_of_two_devices_each(cli):
    """Two replicas, one of two ranks, and one side on each device: the same prompts, lengths and rewards."""
    result = cli("bench", *SMALL, "--gpus", 2, "--train-tp", 2, "--kl-coef", 0.04, "--arms", "overlap,overlap:2x2,disaggregated",
                 "--work", "data", "--out", "out").result
    assert result["failed"] == []
    assert [(arm["arm"], arm["gpus"], arm["replicas"]) for arm in result["arms"]] == [
        ("overlap@time-slice:2x1", 2, 2), ("overlap@time-slice:2x2", 2, 1), ("disaggregated@time-slice", 2, 1)]
    for arm in result["arms"]:
        assert all(arm["hbm_peak_bytes"][device]["actor_snapshot"] > 0 for device in ("host:0", "host:1"))
        assert arm["metrics"][1]["rollplex/prompts_hash"] == result["arms"][0]["metrics"][1]["rollplex/prompts_hash"]
    copied = [arm["metrics"][1].get("rollplex/copy/bytes", 0) for arm in result["arms"]]
    assert copied[:2] == [0, 0] and copied[2] > 0


def test_trl_does_the_same_job(cli):
    """Without arms' meshes: one that cannot come up is a failure of its own, and TRL is measured all the same."""
    done = cli("bench", *SMALL, "--vs", "trl", "--trl-batch", 2, "--work", "data", "--out", "out", "--arms", "serial", "--set",
               "broker.host_limit_bytes=1000")
    assert done.status == 1
    result = done.data
    assert [(item["what"], item["reason"]) for item in result["failed"]] == [("serial@time-slice", "MESH_CANNOT_FIT")]
    trl = result["trl"]
    assert len(trl["steps_s"]) == len(trl["generate_s"]) == 2
    assert trl["step_s"] == trl["steps_s"][1] > trl["generate_s"][1]
    assert trl["prompt_tokens"] == [160]
    assert trl["weights_dtype"] == "torch.float32"
    assert all(norm > 0 for norm in trl["grad_norms"])


@pytest.mark.parametrize(("options", "reason"), [
    (("--arms", "overlap@mps-default"), "POLICY_NEEDS_GPU"), (("--arms", "fast"), "BAD_ARM"),
    (("--prompt-tokens", 30), "BAD_JOB"), (("--iterations", 1), "BAD_JOB"), (("--device", "cuda"), "NO_GPU")])
def test_what_cannot_be_measured_is_refused_before_anything_starts(cli, options, reason):
    import torch

    if reason == "NO_GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli("bench", *SMALL, *options, "--work", "data", "--out", "out").error["reason"] == reason
