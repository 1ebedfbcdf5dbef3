"""An iteration's metrics, under the names that TRL and verl users know (docs/metrics.md lists them)."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rollplex.coordinator.intake import Prompt
from rollplex.coordinator.records import SampleRecord
from rollplex.coordinator.timeline import Timeline
from rollplex.core.overlap import OverlapEstimate


def sample_metrics(prompts: Sequence[Prompt], samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Rewards, lengths and counts. Means over no samples are left out, not made 0."""
    metrics: dict[str, float] = {}
    lengths = [len(sample.token_ids) for sample in samples]
    _spread(metrics, "response_length", lengths)
    _spread(metrics, "completions", lengths, suffix="_length")
    ended = [len(sample.token_ids) for sample in samples if sample.finish_reason == "stop"]
    _spread(metrics, "completions", ended, suffix="_terminated_length")
    clipped = sum(sample.finish_reason == "length" for sample in samples) / max(1, len(samples))
    metrics["response_length/clip_ratio"] = metrics["completions/clipped_ratio"] = clipped
    _spread(metrics, "prompt_length", [len(prompt.group.token_ids) for prompt in prompts])
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    _spread(metrics, "critic/score", rewards)
    _spread(metrics, "critic/rewards", rewards)
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
    metrics["reward/unscored_count"] = float(len(samples) - len(rewards))
    for name, values in sorted(_parts(samples).items()):
        metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
        metrics[f"rewards/{name}/std"] = statistics.pstdev(values)
    metrics["rollplex/prompts_hash"] = prompts_hash(prompts)
    prompt_tokens = sum(len(prompt.group.token_ids) * prompt.group.sample_count for prompt in prompts)
    metrics["perf/total_num_tokens"] = metrics["num_tokens"] = float(prompt_tokens + sum(lengths))
    return metrics


def prompts_hash(prompts: Sequence[Prompt]) -> float:
    """The first 48 bits of a hash over token ids, grids and media bytes: equal numbers, equal prompts in equal order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.group.prompt_hash.encode())
        for item in prompt.group.media:
            digest.update(item.sha256.encode())
    return float(int.from_bytes(digest.digest()[:6], "big"))


def group_metrics(groups: Sequence[Sequence[SampleRecord]]) -> dict[str, float]:
    """What concerns groups: reward_std is the mean of the groups' deviations, as TRL logs it."""
    deviations, flat = [], 0
    advantages: list[float] = []
    for group in groups:
        rewards = [sample.reward for sample in group if sample.reward is not None]
        advantages += [sample.advantage for sample in group if sample.reward is not None and sample.advantage is not None]
        if len(rewards) >= 2:
            deviations.append(statistics.stdev(rewards))
        flat += len(rewards) < 2 or min(rewards) == max(rewards)
    metrics = {"frac_reward_zero_std": flat / max(1, len(groups))}
    if deviations:
        metrics["reward_std"] = statistics.fmean(deviations)
    _spread(metrics, "critic/advantages", advantages)
    return metrics


def time_metrics(timeline: Timeline, tokens: float) -> dict[str, float]:
    """Seconds by phase and span, tokens a second, and equation 1 as far as this iteration alone shows it.

    `saved_s` is the time that spans of the window ran side by side: their sum less the window.
    """
    step_s = timeline.now_s()
    names = {"generate": "gen", "reward": "reward", "reference_prefix": "prefix_reference",
             "trainer_prefix": "prefix_trainer", "score": "ref", "advantage": "adv", "old_logprob": "old_log_prob",
             "suffix": "update_actor", "update": "update_weights", "overlap": "overlap", "ready": "ready",
             "release": "release_kv", "leave": "leave_snapshot", "gradient_norm": "grad_norm", "write": "write_weights",
             "bind": "bind"}
    metrics = {f"timing_s/{name}": timeline.seconds(span) for span, name in names.items() if span in timeline.spans}
    metrics["timing_s/step"] = metrics["perf/time_per_step"] = metrics["step_time"] = step_s
    metrics["perf/throughput"] = tokens / step_s
    if "overlap" not in timeline.spans:
        return metrics
    decode_s, prefix_s = timeline.seconds("generate"), prefix_seconds(timeline)
    window_s = timeline.seconds("overlap")
    metrics.update({"rollplex/overlap/decode_s": decode_s, "rollplex/overlap/prefix_s": prefix_s,
                    "rollplex/overlap/window_s": window_s,
                    "rollplex/overlap/saved_s": max(0.0, decode_s + prefix_s - window_s)})
    estimate = OverlapEstimate(decode_s, prefix_s, step_s - window_s)
    metrics["rollplex/overlap/predicted_step_s"] = estimate.overlap_s
    return metrics


SUMMED = ("actor/pg_loss", "actor/kl_loss", "actor/token_count")
"""Metrics that the trainer scales over the whole mini-batch, so that its commands' values add up."""


def merge_suffix_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One mini-batch's metrics from the commands it took: sums, extremes, and means weighted by tokens."""
    merged: dict[str, float] = {}
    tokens = sum(part.get("actor/token_count", 0.0) for part in parts)
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [(part[name], part.get("actor/token_count", 0.0)) for part in parts if name in part]
        if name in SUMMED:
            merged[name] = sum(value for value, _ in values)
        elif name.endswith(("max", "min")):
            merged[name] = (max if name.endswith("max") else min)(value for value, _ in values)
        else:
            merged[name] = sum(value * weight for value, weight in values) / tokens if tokens else values[0][0]
    return merged


def prefix_seconds(timeline: Timeline) -> float:
    """T_P: the makespan of the prefixes, from the first start to the last end, gaps left out."""
    spans = sorted(span for name in ("reference_prefix", "trainer_prefix") for span in timeline.spans.get(name, ()))
    covered, end_s = 0.0, -math.inf
    for start_s, duration_s in spans:
        covered += max(0.0, start_s + duration_s - max(start_s, end_s))
        end_s = max(end_s, start_s + duration_s)
    return covered


def _parts(samples: Sequence[SampleRecord]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.parts.items():
            parts[name].append(value)
    return parts


def _spread(metrics: dict[str, float], name: str, values: Sequence[float], suffix: str = "") -> None:
    if values:
        metrics[f"{name}/mean{suffix}"] = statistics.fmean(values)
        metrics[f"{name}/max{suffix}"] = float(max(values))
        metrics[f"{name}/min{suffix}"] = float(min(values))
