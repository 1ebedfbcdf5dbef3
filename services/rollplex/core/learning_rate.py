"""The learning-rate schedule as a factor on every module's rate."""

from __future__ import annotations

import math

from rollplex.core.config import OptimizerConfig


def learning_rate_factor(config: OptimizerConfig, step: int) -> float:
    """Factor in [0, 1] at optimizer step `step`, counted from 1: linear warm-up, then the schedule's decay."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - 1 - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
