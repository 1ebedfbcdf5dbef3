"""The numbers from a made-up pair of runs, against ones made by hand."""

from __future__ import annotations

import dataclasses
import sys
import threading
from html.parser import HTMLParser

import pytest
from canned_run import canned_history

from rollplex.core.errors import DataLoss, InternalError
from rollplex_client.bench.arms import Arm
from rollplex_client.bench.gpu_memory import MemoryWatch, watch_memory, watched
from rollplex_client.bench.measure import arm_result, equation_rows, ledger_peaks
from rollplex_client.bench.page import arm_lanes, render
from rollplex_client.bench.run_arm import ArmRun, check_same_job, check_updated
from rollplex_client.bench.tables import memory_rows, summary_lines
from rollplex_client.bench.trl import trl_result
from rollplex_client.results import LedgerEntry, PhaseSpan

HARDWARE = {"gpu": "NVIDIA H200", "stated_flops": 989.5e12, "measured_flops": 700e12, "stated_bandwidth": 4.8e12,
            "measured_bandwidth": 4.3e12}


def arm_run(job, schedule: str, policy: str) -> ArmRun:
    history = canned_history(schedule, job.iterations)
    for record in history.iterations:
        record.result.metrics.update({"rollplex/rollout/decode_s": 0.8, "rollplex/rollout/prefill_s": 0.2,
                                      "rollplex/rollout/decode_steps": 500.0, "rollplex/rollout/decode_batch": 8.0,
                                      "rollplex/prompts_hash": 7.0})
    barrier = PhaseSpan("update", "bind", True, 2.7, 0.05)
    history = dataclasses.replace(history, iterations=tuple(
        dataclasses.replace(record, spans=(*record.spans, barrier)) for record in history.iterations))
    return ArmRun(Arm(schedule, policy), history, [job.lengths(iteration) for iteration in range(job.iterations)],
                  f"of {schedule}", 12.0, [2.9, 3.1], MemoryWatch(1 << 30, 60 << 30), {"mesh": {"sharing": policy}})


@pytest.fixture
def runs(job) -> list[ArmRun]:
    return [arm_run(job, "serial", "time-slice"), arm_run(job, "overlap", "mps-priority")]


def test_an_arm_is_measured_without_its_first_iteration(job, runs):
    found = arm_result(job, runs[0], HARDWARE)
    assert (found["arm"], found["steps_s"], found["step_s"], found["wall_s"]) == ("serial@time-slice", [2.8, 2.8], 2.8, 3.0)
    assert found["phase_s"]["gen"] == 1.0
    flops = sorted(job.model.step(job.work(iteration), reference=False) for iteration in (1, 2))
    assert found["mfu"]["of_stated"] == pytest.approx(sum(flops) / 2 / 2.8 / 989.5e12)
    assert found["mfu"]["unshared_of_stated"] > 3 * found["mfu"]["of_stated"]
    tokens = sum(sum(map(sum, job.lengths(iteration))) for iteration in (1, 2)) / 2
    assert found["throughput"]["response_tokens_per_s"] == pytest.approx(tokens / 2.8)
    assert found["throughput"]["tokens_per_s"] == pytest.approx((4 * 8 * 4096 + tokens) / 2.8)


def test_distances_are_measured_over_the_least_time(job, runs):
    found = arm_result(job, runs[0], HARDWARE)
    weights, wanted = 500 * job.model.decode_weight_bytes(2), []
    for iteration in (1, 2):
        decoded = sum(length - 1 for row in job.lengths(iteration) for length in row)
        # 500 steps of 8 samples: some tokens were decoded beside prompts.
        assert decoded > 4000
        wanted.append(weights + 4000 / decoded * job.model.kv_read_bytes(job.work(iteration), 2, shared=False))
    assert found["decode"]["per_sample_bytes"] == pytest.approx(sum(wanted) / 2)
    assert found["decode"]["per_sample_distance_measured"] == pytest.approx(sum(0.8 / (size / 4.3e12) for size in wanted) / 2)
    assert found["decode"]["shared_distance_measured"] > found["decode"]["per_sample_distance_measured"]
    assert found["decode"]["token_step_s"] == pytest.approx(0.8 / 500)
    prefix = 4 * job.model.prefix(job.prompt_size)
    assert found["prefix"]["trainer"]["distance_stated"] == pytest.approx(989.5e12 / (prefix / 0.35))
    assert found["prefix"]["reference"]["flops_per_s"] == pytest.approx(prefix / 0.3)


def test_a_rollout_is_bounded_by_its_prompts_and_its_decoding(job, runs):
    found = arm_result(job, runs[0], HARDWARE)["rollout"]
    prompts = 4 * (job.model.prefix(job.prompt_size) + job.model.head) / 700e12
    bounds = [prompts + job.model.decode_bytes(job.work(iteration), 2, shared=False) / 4.3e12 for iteration in (1, 2)]
    assert found["measured_s"] == 1.0
    assert found["distance_measured"] == pytest.approx(sum(1 / bound for bound in bounds) / 2)


def test_unknown_peaks_give_no_distance(job, runs):
    found = arm_result(job, runs[0], HARDWARE | {"stated_flops": None, "stated_bandwidth": None})
    assert found["mfu"]["of_stated"] is None
    assert found["decode"]["shared_distance_stated"] is None
    assert found["prefix"]["trainer"]["distance_stated"] is None
    assert found["mfu"]["of_measured"] > 0


def test_equation_1_compares_with_the_serial_arm(runs):
    row = equation_rows(runs)["overlap@mps-priority"]
    assert (row["serial_s"], row["decode_s"], row["prefix_s"], row["measured_s"]) == (2.8, 1.0, 0.65, 2.25)
    assert row["predicted_s"] == pytest.approx(1.0 + (2.8 - 1.65))
    assert row["speedup"] == pytest.approx(2.8 / 2.25)
    assert equation_rows(runs[1:]) == {}


def test_arms_that_did_another_job_are_found_out(job, runs):
    check_same_job(runs)
    shorter = dataclasses.replace(runs[1], lengths=[[[1] * 8] * 4] * 3)
    with pytest.raises(DataLoss, match="overlap@mps-priority did another job than serial@time-slice"):
        check_same_job([runs[0], shorter])
    runs[1].history.iterations[2].result.metrics["rollplex/prompts_hash"] = 8.0
    with pytest.raises(DataLoss, match="prompts, lengths or rewards"):
        check_same_job(runs)


def test_an_arm_that_trained_nothing_is_no_result(runs):
    check_updated(runs[1])
    runs[1].history.iterations[1].result.metrics.update({"rollplex/update_skipped": 1.0, "grad_norm": float("nan")})
    with pytest.raises(InternalError, match=r"overlap@mps-priority: no update in iterations 1 \(gradient norm nan\)"):
        check_updated(runs[1])


def test_ledger_peaks_by_class_and_their_largest_phase():
    peaks = [LedgerEntry("actor_snapshot", "trainer", "cuda:0", phase, 8, 1) for phase in ("overlap", "suffix")]
    peaks += [LedgerEntry("rollout_kv", "rollout", "cuda:0", "overlap", 5, 1),
              LedgerEntry("gradients", "trainer", "cuda:0", "suffix", 7, 1),
              LedgerEntry("media", "coordinator", "host", "overlap", 3, 1, "pinned"),
              LedgerEntry("actor_snapshot", "rollout", "cuda:0", "suffix", 1, 1, "hbm"),
              LedgerEntry("prefix_activations", "trainer", "cuda:0", "suffix", 100, 0, "pinned")]
    assert ledger_peaks(peaks) == {"cuda:0": {"actor_snapshot": 9, "rollout_kv": 5, "gradients": 7, "all": 16},
                                   "host": {"media": 3, "all": 3}}


def test_gpus_of_which_all_is_alike_share_a_row():
    alike, other = {"gradients": 7 << 30, "all": 8 << 30}, {"rollout_kv": 5 << 30, "all": 5 << 30}
    two = {"cuda:0": alike, "cuda:1": alike}
    arms = [{"hbm_peak_bytes": two}, {"hbm_peak_bytes": two | {"cuda:2": other}}]
    assert list(memory_rows({"arms": arms})) == [
        ("cuda:0, 1: gradients", ["7.0 GiB", "7.0 GiB"]), ("cuda:0, 1: largest phase, all classes", ["8.0 GiB", "8.0 GiB"]),
        ("cuda:2: rollout_kv", ["–", "5.0 GiB"]), ("cuda:2: largest phase, all classes", ["–", "5.0 GiB"])]


def test_several_gpus_share_a_bound(job, runs):
    """Two ranks of a replica read half of the bytes each; two replicas share prompts and contexts, and each reads all weights."""
    def of(train_tp, rollout_tp):
        return arm_result(job, dataclasses.replace(runs[1], arm=Arm("overlap", "mps-priority", train_tp, rollout_tp)), HARDWARE)

    one, wide, replicas = of(1, 1), of(2, 2), of(2, 1)
    assert wide["decode"]["per_sample_distance_measured"] == pytest.approx(2 * one["decode"]["per_sample_distance_measured"])
    assert replicas["decode"] == one["decode"]
    assert wide["rollout"]["distance_measured"] == pytest.approx(2 * one["rollout"]["distance_measured"])
    assert 1 < replicas["rollout"]["distance_measured"] / one["rollout"]["distance_measured"] < 2
    assert wide["prefix"]["trainer"]["flops_per_s"] == pytest.approx(one["prefix"]["trainer"]["flops_per_s"] / 2)
    assert wide["mfu"]["of_stated"] == pytest.approx(one["mfu"]["of_stated"] / 2)
    assert (wide["gpus"], wide["replicas"], replicas["replicas"]) == (2, 1, 2)


def test_equation_1_wants_a_serial_arm_of_the_same_degrees(runs):
    wide = dataclasses.replace(runs[1], arm=Arm("overlap", "mps-priority", 2, 1))
    assert list(equation_rows([*runs, wide])) == ["overlap@mps-priority"]
    serial = dataclasses.replace(runs[0], arm=Arm("serial", "time-slice", 2, 1))
    assert list(equation_rows([serial, *runs, wide])) == ["overlap@mps-priority", "overlap@mps-priority:2x1"]


def test_a_peak_is_seen_and_what_was_there_before():
    sizes, seen = iter([5, 6, 9, 7]), threading.Event()

    def used() -> int:
        try:
            return next(sizes)
        except StopIteration:
            seen.set()
            return 2

    with watched(used) as watch:
        assert seen.wait(30)
    assert (watch.before_bytes, watch.peak_bytes) == (5, 9)


def test_no_gpu_no_memory_figure():
    with watch_memory("cpu") as watch:
        pass
    assert (watch.before_bytes, watch.peak_bytes) == (None, None)


@pytest.fixture
def result(job, runs) -> dict:
    arms = [arm_result(job, run, HARDWARE) for run in runs]
    trl = {"steps_s": [40.0, 16.0, 14.0], "generate_s": [9.0, 4.0, 4.0], "prompt_tokens": [4096],
           "micro_batch": 8,
           "vllm_options": {}, "settings": {"precision": "float32 <masters>"},
           "gpu_memory": {"before_bytes": 0, "peak_bytes": 120 << 30}}
    return {"origin": {"date": "2026-11-29T20:00:00Z", "command": "rollplex bench"}, "hardware": HARDWARE, "job": job.plain(),
            "build": {"weight_bytes": 1}, "arms": arms, "equation": equation_rows(runs),
            "trl": trl_result(job, trl, arms, HARDWARE),
            "failed": [{"what": "overlap@<x>", "reason": "BAD", "message": "it & failed"}]}


def test_trl_is_set_against_every_arm(result):
    trl = result["trl"]
    assert trl["step_s"] == 15.0
    assert trl["slower_than"] == {"serial@time-slice": 5.0, "overlap@mps-priority": 5.0}
    assert trl["mfu"]["unshared_of_stated"] > trl["mfu"]["of_stated"]


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Opens nothing."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_well_formed(result):
    page = render(result)
    balance = Balance()
    balance.feed(page.removeprefix("<!doctype html>"))
    assert balance.open == []
    for text in ("serial@time-slice", "overlap@mps-priority", "TRL", "Equation 1", "5.00", "float32 &lt;masters&gt;", "<svg",
                 "it &amp; failed", "actor_snapshot", "NVIDIA H200"):
        assert text in page, text
    assert "http" not in page.replace("http-equiv", "")


def test_the_timeline_splits_rollout_and_has_every_role(result):
    lanes = {lane.label: lane.bars for lane in arm_lanes(result["arms"][1])}
    assert set(lanes) == {"rollout", "reference", "trainer", "mesh"}
    assert [(bar.label, bar.start_s) for bar in lanes["mesh"]] == [("bind", 2.7)]
    assert [(bar.label, bar.start_s, round(bar.duration_s, 6)) for bar in lanes["rollout"]] == [
        ("prefill", 0.0, 0.2), ("decode", 0.2, 0.9)]
    assert [bar.label for bar in lanes["trainer"]] == ["prefix", "suffix and backward", "update"]


def test_a_console_gets_every_table_and_what_failed(result):
    lines = summary_lines(result)
    heads = [after for before, after in zip(lines, lines[1:]) if before == ""]
    assert [head.split("  ")[0].strip() for head in heads] == ["", "seconds of", "bounds", "equation 1, seconds", "first update",
                                                                   "ledger, peak"]
    assert heads[0].split() == ["serial@time-slice", "overlap@mps-priority", "TRL"]
    assert lines[-1] == "FAILED overlap@<x>: it & failed [BAD]"
    assert next(line for line in lines if "samples as in the first arm" in line).split()[-2:] == ["yes", "no"]
    step = next(line for line in lines if line.startswith("step, seconds"))
    assert step.split()[2:] == ["2.800", "2.250", "15.000"]
    assert len(step) == len(heads[0])


def test_without_the_drivers_library_memory_is_left_empty(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    with watch_memory("cuda") as watch:
        pass
    assert (watch.before_bytes, watch.peak_bytes) == (None, None)
