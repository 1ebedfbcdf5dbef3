"""[run.loss]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollplex.core.advantages import ESTIMATORS
from rollplex.core.config.checks import check_at_least, check_one_of

AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    advantage: str = "grpo"
    """`grpo`, `dr_grpo` or `rloo`."""
    aggregation: str = "token-mean"
    """`seq-mean-token-mean` (GRPO), `token-mean` (DAPO) or `seq-mean-token-sum-norm` (Dr. GRPO)."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """Bound c > 1 of -A c for negative advantages; 0: off."""
    ratio_level: str = "token"
    """`token`, or `sequence` for GSPO's length-normalised ratio."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0: no reference work at all."""
    kl_estimator: str = "k3"
    importance_correction: str = "off"
    """Truncated importance weights against rollout's log-probabilities: `off`, `token` or `sequence`."""
    importance_cap: float = 2.0
    """Upper bound of those weights."""

    def __post_init__(self) -> None:
        check_one_of("advantage", self.advantage, ESTIMATORS)
        check_one_of("aggregation", self.aggregation, AGGREGATIONS)
        check_one_of("ratio_level", self.ratio_level, ("token", "sequence"))
        check_one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_one_of("importance_correction", self.importance_correction, ("off", "token", "sequence"))
        for name in ("clip_low", "clip_high", "dual_clip", "kl_coef"):
            check_at_least(name, getattr(self, name), 0)
        if not 0 < self.importance_cap < math.inf:
            raise ValueError(f"importance_cap is {self.importance_cap}; it must be finite and above 0")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be 0 (off) or above 1")
