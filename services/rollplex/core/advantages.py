"""Group-relative advantages, in float64. A sample without reward (None) is unscored: out of mean and std, advantage 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-4
"""TRL's and Video-R1's; verl's 1e-6 turns rounding noise of equal rewards into advantages."""

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def advantages(rewards: Sequence[float | None], estimator: str = "grpo") -> list[float]:
    """One advantage a sample.

    `grpo` (DeepSeekMath, arXiv 2402.03300, eq. 3): (r - mean) / (std + 1e-4), std unbiased. `dr_grpo` (arXiv
    2503.20783): r - mean. `rloo` (arXiv 2402.14740): r - mean of the others = (r - mean) n / (n - 1). Exactly 0
    everywhere when all scored rewards are equal or fewer than two samples are scored. Raises ValueError for an unknown
    estimator or a reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"advantage estimator {estimator!r} is none of {', '.join(ESTIMATORS)}")
    scored = [float(reward) for reward in rewards if reward is not None]
    if any(not math.isfinite(reward) for reward in scored):
        raise ValueError(f"rewards must be finite: {list(rewards)}")
    if len(scored) < 2 or min(scored) == max(scored):
        return [0.0] * len(rewards)
    count = len(scored)
    mean = math.fsum(scored) / count
    scale = 1.0
    if estimator == "grpo":
        scale = 1.0 / (math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (count - 1)) + STD_EPSILON)
    elif estimator == "rloo":
        scale = count / (count - 1)
    return [0.0 if reward is None else (float(reward) - mean) * scale for reward in rewards]


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether the group teaches anything: two scored samples with different rewards."""
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) >= 2 and min(scored) != max(scored)
