"""A run's events as the coordinator sends them, made up: a serial and an overlap run of the same prompts."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from rollplex_client.history import RunHistory, collect
from rollplex_client.results import Event, Iteration, LedgerEntry, Note, PhaseSpan, Progress, Run

BEGUN = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
MIB = 2**20


def _spans(schedule: str) -> list[tuple[str, str, float, float]]:
    """(phase, span, start_s, duration_s)."""
    if schedule == "serial":
        return [("overlap", "overlap", 0.0, 1.7), ("overlap", "generate", 0.0, 1.0),
                ("overlap", "reference_prefix", 1.0, 0.3), ("overlap", "trainer_prefix", 1.3, 0.35),
                ("overlap", "reward", 1.65, 0.05), ("suffix", "score", 1.7, 0.2), ("suffix", "suffix", 1.9, 0.6),
                ("update", "update", 2.5, 0.3)]
    return [("overlap", "overlap", 0.0, 1.15), ("overlap", "generate", 0.0, 1.1),
            ("overlap", "reference_prefix", 0.0, 0.4), ("overlap", "trainer_prefix", 0.0, 0.5),
            ("overlap", "reward", 1.1, 0.05), ("suffix", "score", 1.15, 0.2), ("suffix", "suffix", 1.35, 0.6),
            ("update", "update", 1.95, 0.3)]


def _metrics(schedule: str, iteration: int) -> dict[str, float]:
    accuracy = 0.3 + 0.6 / (1 + math.exp(-(iteration - 12) / 4)) + 0.04 * math.sin(iteration * 2.3)
    step, prefix, window = (2.8, 0.65, 1.7) if schedule == "serial" else (2.25, 0.5, 1.15)
    return {"reward": 1.0 + accuracy, "reward_std": 0.4, "rewards/video_r1/mean": 1.0 + accuracy,
            "rewards/video_r1/accuracy/mean": accuracy, "rewards/video_r1/format/mean": 1.0, "timing_s/step": step,
            "timing_s/gen": 1.0 if schedule == "serial" else 1.1, "timing_s/overlap": window,
            "timing_s/prefix_reference": 0.3, "timing_s/prefix_trainer": 0.35, "timing_s/reward": 0.05,
            "timing_s/ref": 0.2, "timing_s/update_actor": 0.6, "timing_s/update_weights": 0.3,
            "rollplex/overlap/decode_s": 1.0 if schedule == "serial" else 1.1, "rollplex/overlap/prefix_s": prefix,
            "rollplex/overlap/window_s": window, "perf/throughput": 5200.0, "reward/unscored_count": 0.0}


def canned_events(schedule: str, iterations: int) -> list[Event]:
    """A validation before, then iterations, a validation after every tenth; one warning."""
    events: list[Event] = []

    def add(iteration: int, body: object, validation: bool = False) -> None:
        events.append(Event(len(events) + 1, BEGUN, iteration, validation, body))

    def done(iteration: int, validation: bool, snapshot: int, metrics: dict[str, float]) -> None:
        add(iteration, Iteration("canned", iteration, validation, "done", snapshot, metrics, None, BEGUN, BEGUN),
            validation)

    done(0, True, 0, {"val/rewards/video_r1/accuracy/mean": 0.36})
    for iteration in range(iterations):
        for phase, span, start_s, duration_s in _spans(schedule):
            add(iteration, PhaseSpan(phase, span, False, start_s, 0.0))
            add(iteration, PhaseSpan(phase, span, True, start_s, duration_s))
        add(iteration, Progress(64, 64, 64, 900, 1.2))
        done(iteration, False, iteration, _metrics(schedule, iteration))
        if iteration % 10 == 9:
            done(iteration // 10 + 1, True, iteration + 1,
                 {"val/rewards/video_r1/accuracy/mean": 0.36 + 0.018 * iteration})
    add(iterations - 1, Note("warning", "UNSCORED", "group 3, sample 1 is unscored: <timed out>"))
    return events


def canned_history(schedule: str = "overlap", iterations: int = 30) -> RunHistory:
    events = canned_events(schedule, iterations)
    run = Run("canned", "active", {"schedule": schedule, "seed": 0, "sampling": {"samples_per_group": 8}}, iterations,
              iterations, BEGUN, len(events))
    peaks = [LedgerEntry("actor_snapshot", "trainer", "host", phase, 3 * MIB, 1)
             for phase in ("overlap", "suffix", "update")]
    peaks += [LedgerEntry("optimizer_state", "trainer", "host", phase, 9 * MIB, 1)
              for phase in ("overlap", "suffix", "update")]
    peaks += [LedgerEntry("media", "coordinator", "host", phase, 300 * 1024, 8) for phase in ("overlap", "suffix")]
    peaks += [LedgerEntry("rollout_kv", "rollout", "host", "overlap", 2 * MIB, 0),
              LedgerEntry("gradients", "trainer", "host", "suffix", 3 * MIB, 1)]
    return collect(run, events, peaks)
