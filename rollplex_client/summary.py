"""Numbers of a run: how it learned, where its time went, and what overlap saved against the paper's equation 1."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollplex.core.overlap import OverlapEstimate
from rollplex_client.history import IterationRecord, RunHistory, mean

WINDOW = 5
"""Iterations at either end over which learning is measured."""
TIMING_PREFIX = "timing_s/"


def learning(history: RunHistory) -> dict[str, float | None]:
    """Accuracy and reward over the first and last five iterations, and of the first and last validation."""
    accuracies = [record.accuracy for record in history.iterations if record.accuracy is not None]
    rewards = [value for _, value in history.values("reward")]
    heldout = [record.accuracy for record in history.validations if record.accuracy is not None]
    return {"accuracy_first5": mean(accuracies[:WINDOW]), "accuracy_last5": mean(accuracies[-WINDOW:]),
            "reward_first5": mean(rewards[:WINDOW]), "reward_last5": mean(rewards[-WINDOW:]),
            "heldout_first": heldout[0] if heldout else None, "heldout_last": heldout[-1] if heldout else None}


def phase_seconds(history: RunHistory) -> dict[str, float]:
    """Mean seconds of an iteration by what it did, from the timing_s/ metrics."""
    names = sorted({name for record in history.iterations for name in record.metrics if name.startswith(TIMING_PREFIX)})
    return {name.removeprefix(TIMING_PREFIX): value for name in names if (value := history.mean(name)) is not None}


@dataclass(frozen=True, slots=True)
class OverlapComparison:
    """One and the same prompts, samples and lengths, run `serial` and run `overlap`; seconds, medians over iterations."""

    iterations: int
    serial_s: float
    """Measured whole iteration, serial."""
    decode_s: float
    """T_D: rollout alone."""
    prefix_s: float
    """T_P: the prefixes of reference and trainer, one after the other."""
    post_s: float
    """T_post: the rest."""
    predicted_s: float
    """max(T_D, T_P) + T_post: nothing slows the other down."""
    decode_slowdown_s: float
    """dD: how much longer decode took beside the prefixes."""
    prefix_slowdown_s: float
    """dP."""
    predicted_with_slowdown_s: float
    """max(T_D + dD, T_P + dP) + T_post."""
    measured_s: float
    """Measured whole iteration, overlap."""

    def plain(self) -> dict[str, float]:
        return asdict(self)


def compare_overlap(serial: Sequence[IterationRecord], overlap: Sequence[IterationRecord]
                    ) -> OverlapComparison | None:
    """None where the timings are missing. The records must be of the same prompts and seeds."""
    count = min(len(serial), len(overlap))
    alone = [_parts(record) for record in serial[:count]]
    beside = [_parts(record) for record in overlap[:count]]
    if not count or None in alone or None in beside:
        return None
    step, decode, prefix = (statistics.median(column) for column in zip(*alone))
    step_beside, decode_beside, prefix_beside = (statistics.median(column) for column in zip(*beside))
    post = max(step - decode - prefix, 0.0)
    slower_decode, slower_prefix = decode_beside - decode, prefix_beside - prefix
    ideal = OverlapEstimate(decode, prefix, post)
    slowed = OverlapEstimate(decode, prefix, post, slower_decode, slower_prefix)
    return OverlapComparison(count, step, decode, prefix, post, ideal.overlap_s, slower_decode, slower_prefix,
                             slowed.overlap_s, step_beside)


def _parts(record: IterationRecord) -> tuple[float, float, float] | None:
    """(whole, decode, prefix) seconds of an iteration."""
    metrics = record.metrics
    names = ("timing_s/step", "rollplex/overlap/decode_s", "rollplex/overlap/prefix_s")
    if any(name not in metrics for name in names):
        return None
    step_s, decode_s, prefix_s = (metrics[name] for name in names)
    return step_s, decode_s, prefix_s


def summary(history: RunHistory, wall_s: float) -> dict[str, Any]:
    """What every training leaves in summary.json; commands add their own keys."""
    return {"run": history.run.name, "iterations": len(history.iterations), "wall_s": wall_s,
            **learning(history), "schedule": history.run.config.get("schedule", "overlap"),
            "snapshot": history.run.snapshot, "phase_s": phase_seconds(history),
            "tokens_per_s": history.mean("perf/throughput"), "unscored_per_iteration": history.mean("reward/unscored_count")}
