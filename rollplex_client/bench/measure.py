"""From what arms have done to the benchmark's numbers. Medians over the measured iterations; the first is never measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rollplex.core.model_work import GroupWork, tokens_of
from rollplex_client.bench.arms import Arm
from rollplex_client.bench.job import Job
from rollplex_client.bench.run_arm import ArmRun
from rollplex_client.history import IterationRecord
from rollplex_client.results import LedgerEntry
from rollplex_client.summary import TIMING_PREFIX, compare_overlap

FIRST_MEASURED = 1


def arm_result(job: Job, run: ArmRun, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of one arm, as JSON."""
    records = run.history.iterations[FIRST_MEASURED:]
    works = [job.work(record.result.iteration) for record in records]
    step_s = [record.metrics["timing_s/step"] for record in records]
    names = sorted({name for record in records for name in record.metrics if name.startswith(TIMING_PREFIX)})
    return {
        "arm": str(run.arm), "schedule": run.arm.schedule, "policy": run.arm.policy, "gpus": run.arm.gpus,
        "train_tp": run.arm.train_tp, "rollout_tp": run.arm.rollout_tp, "data_parallel": run.arm.data_parallel,
        "replicas": run.arm.topology.replica_count,
        "start_s": run.start_s,
        "first_update": {"samples_sha256": run.first_samples,
                         "gradient_norm": run.history.iterations[0].metrics.get("actor/grad_norm")},
        "first_step_s": run.history.iterations[0].metrics["timing_s/step"], "steps_s": step_s,
        "step_s": statistics.median(step_s), "walls_s": run.wall_s, "wall_s": statistics.median(run.wall_s),
        "phase_s": {name.removeprefix(TIMING_PREFIX): _median(records, name) for name in names},
        "throughput": throughput(works, step_s, job.samples),
        "mfu": mfu(job, works, step_s, hardware, run.arm.gpus),
        "rollout": rollout_distance(job, works, [record.metrics["timing_s/gen"] for record in records], hardware, run.arm),
        "decode": decode_distance(job, works, records, hardware, run.arm.rollout_tp),
        "prefix": {role: prefix_distance(job, works, [record.metrics.get(f"timing_s/prefix_{role}") for record in records],
                                         hardware, run.arm.train_tp) for role in ("trainer", "reference")},
        "hbm_peak_bytes": ledger_peaks(run.history.peaks), "gpu_memory": {
            "before_bytes": run.memory.before_bytes, "peak_bytes": run.memory.peak_bytes},
        "metrics": [dict(sorted(record.metrics.items())) for record in run.history.iterations],
        "spans": [[span.span, span.start_s, span.duration_s] for span in records[-1].spans], "config": run.config}


def _median(records: Sequence[IterationRecord], name: str) -> float:
    return statistics.median(record.metrics[name] for record in records if name in record.metrics)


def throughput(works: Sequence[Sequence[GroupWork]], step_s: Sequence[float], samples: int) -> dict[str, float]:
    """Tokens a second: of responses; and, as verl counts, with the prompt for every sample."""
    rates = []
    for work, seconds in zip(works, step_s, strict=True):
        prompts, responses = tokens_of(work)
        rates.append((responses / seconds, (prompts * samples + responses) / seconds))
    response, total = (statistics.median(column) for column in zip(*rates))
    return {"response_tokens_per_s": response, "tokens_per_s": total}


def mfu(job: Job, works: Sequence[Sequence[GroupWork]], step_s: Sequence[float], hardware: Mapping[str, Any], gpus: int
        ) -> dict[str, float | None]:
    """Model FLOPs utilisation: the FLOPs that a step needs (`rollplex.core.model_work`: vision tower counted, prompts once a
    group and role, no recomputation) over time, GPUs and peak FLOP/s (PaLM, arXiv 2204.02311, appendix B).

    `unshared`: the same with prompts counted for every sample in training, which is what a trainer without prefix sharing
    computes; it says how busy such a trainer keeps the GPU, not how much of its work was needed.
    """
    def rate(shared: bool) -> float:
        return statistics.median(job.model.step(work, reference=job.kl_coef > 0, shared=shared) / seconds / gpus
                                 for work, seconds in zip(works, step_s, strict=True))

    needed, computed = rate(True), rate(False)
    return {"flops_per_s": needed,
            **{f"of_{name}": _over(needed, hardware[f"{name}_flops"]) for name in ("stated", "measured")},
            **{f"unshared_of_{name}": _over(computed, hardware[f"{name}_flops"]) for name in ("stated", "measured")}}


def decode_distance(job: Job, works: Sequence[Sequence[GroupWork]], records: Sequence[IterationRecord],
                    hardware: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Time of the engine's decode steps over the time that their bytes need: weights in every step, and keys and values of each
    sample's context, or of the prompt once a group (`shared`). Of the replica that decoded longest, on each of its `tp` GPUs.

    Steps that also have prompt tokens are no decode steps, so of all keys and values only the share counts that the decode
    steps' samples read: they as a part of all tokens that are decoded.
    """
    decode_s = [record.metrics["rollplex/rollout/decode_s"] for record in records]
    # Where every response has one token there is no decode step.
    steps, batch = ([record.metrics.get(f"rollplex/rollout/decode_{name}", 0.0) for record in records]
                    for name in ("steps", "batch"))
    result: dict[str, Any] = {"measured_s": statistics.median(decode_s), "token_steps": statistics.median(steps),
                              "batch": statistics.median(batch),
                              "token_step_s": statistics.median(map(_per, decode_s, steps))}
    for name, shared in (("per_sample", False), ("shared", True)):
        bytes_read = [count * job.model.decode_weight_bytes(job.item_bytes)
                      + min(1.0, count * rows / max(1, _decoded(work)))
                      * job.model.kv_read_bytes(work, job.item_bytes, shared=shared)
                      for work, count, rows in zip(works, steps, batch, strict=True)]
        bytes_read = [size / tp for size in bytes_read]
        result[f"{name}_bytes"] = statistics.median(bytes_read)
        for source in ("stated", "measured"):
            bandwidth = hardware[f"{source}_bandwidth"]
            result[f"{name}_distance_{source}"] = None if not bandwidth else statistics.median(
                _per(seconds, size / bandwidth) for seconds, size in zip(decode_s, bytes_read, strict=True))
    return result


def _decoded(work: Sequence[GroupWork]) -> int:
    """Tokens that decoding makes: all but each response's first."""
    return sum(length - 1 for group in work for length in group.lengths)


def _per(value: float, count: float) -> float:
    return value / count if count else 0.0


def rollout_distance(job: Job, works: Sequence[Sequence[GroupWork]], rollout_s: Sequence[float], hardware: Mapping[str, Any],
                     arm: Arm) -> dict[str, float | None]:
    """Whole rollout over the FLOPs of its prompts, computed once a group, and then the bytes of its decoding, every sample
    reading its own context. Unlike `decode_distance` it does not depend on where an engine draws the line between the two.

    Replicas share prompts, keys and values evenly, but each reads all weights, for as many steps as the longest response has.
    """
    replicas, tp = arm.topology.replica_count, arm.rollout_tp
    result: dict[str, float | None] = {"measured_s": statistics.median(rollout_s)}
    for source in ("stated", "measured"):
        flops, bandwidth = hardware[f"{source}_flops"], hardware[f"{source}_bandwidth"]
        result[f"distance_{source}"] = None if not flops or not bandwidth else statistics.median(
            seconds / (sum(job.model.prefix(group.prompt) + job.model.head for group in work) / flops / replicas / tp
                       + job.model.decode_bytes(work, job.item_bytes, shared=False, replicas=replicas) / bandwidth / tp)
            for work, seconds in zip(works, rollout_s, strict=True))
    return result


def prefix_distance(job: Job, works: Sequence[Sequence[GroupWork]], prefix_s: Sequence[float | None],
                    hardware: Mapping[str, Any], tp: int) -> dict[str, float | None] | None:
    """FLOP/s of a role's prefixes on each of its `tp` GPUs, vision included, and how far that is from the peak; None where
    there were none. Every rank computes the whole tower, of which one counts."""
    if not prefix_s or None in prefix_s:
        return None
    rates = [sum(job.model.prefix(group.prompt) for group in work) / seconds / tp
             for work, seconds in zip(works, prefix_s, strict=True)]
    rate = statistics.median(rates)
    return {"measured_s": statistics.median(prefix_s), "flops_per_s": rate,
            **{f"distance_{name}": None if not hardware[f"{name}_flops"] else hardware[f"{name}_flops"] / rate
               for name in ("stated", "measured")}}


def ledger_peaks(peaks: Sequence[LedgerEntry]) -> dict[str, dict[str, int]]:
    """Device -> object class -> largest bytes in any phase, all roles together; and the largest phase's sum under "all". What is
    parked in the host's memory for a device is not on it."""
    by_phase: dict[tuple[str, str, str], int] = {}
    for entry in peaks:
        if entry.residency == "pinned" and entry.device != "host":
            continue
        for name in (entry.object_class, "all"):
            key = entry.device, entry.phase, name
            by_phase[key] = by_phase.get(key, 0) + entry.size_bytes
    by_device: dict[str, dict[str, int]] = {}
    for (device, _, name), size in by_phase.items():
        classes = by_device.setdefault(device, {})
        classes[name] = max(classes.get(name, 0), size)
    return by_device


def equation_rows(runs: Sequence[ArmRun]) -> dict[str, dict[str, float]]:
    """Arm -> the paper's equation 1 for it, from the serial arm of the same go and degrees; empty without one."""
    rows = {}
    for run in runs:
        serial = next((other for other in runs if other.arm.schedule == "serial"
                       and other.arm.topology == run.arm.topology), None)
        if run.arm.schedule == "overlap" and serial is not None:
            compared = compare_overlap(serial.history.iterations[FIRST_MEASURED:], run.history.iterations[FIRST_MEASURED:])
            if compared is not None:
                rows[str(run.arm)] = compared.plain() | {"speedup": compared.serial_s / compared.measured_s}
    return rows


def _over(value: float, peak: float | None) -> float | None:
    return None if not peak else value / peak
