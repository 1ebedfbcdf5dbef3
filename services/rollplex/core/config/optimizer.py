"""[run.optimizer]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollplex.core.config.checks import check_at_least, check_one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    """Of the decoder."""
    vision_learning_rate: float | None = None
    """Of the vision tower; absent: as the decoder. 0 freezes it (no graph is built through it)."""
    projector_learning_rate: float | None = None
    """Of the merger between tower and decoder; absent: as the decoder. 0 freezes it."""
    freeze_decoder: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled (AdamW); not applied to biases and norms."""
    max_grad_norm: float = 1.0
    """Global L2 clip; 0: off."""
    schedule: str = "constant"
    """`constant`, `linear` or `cosine` to 0 over total_steps, after warmup_steps from 0."""
    warmup_steps: int = 0
    total_steps: int = 0
    """Needed by `linear` and `cosine`."""
    updates_per_iteration: int = 1
    """Mini-batches of groups a rollout; above 1 the ratio is taken against stored log-probabilities."""
    chunk_elements: int = 1 << 24
    """Elements of a chunk of the streamed update."""

    def __post_init__(self) -> None:
        check_one_of("schedule", self.schedule, ("constant", "linear", "cosine"))
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "total_steps"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("vision_learning_rate", "projector_learning_rate"):
            check_at_least(name, getattr(self, name) or 0, 0)
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon is {self.epsilon}; it must be finite and above 0")
        check_at_least("updates_per_iteration", self.updates_per_iteration, 1)
        check_at_least("chunk_elements", self.chunk_elements, 1)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps above warmup_steps "
                             f"({self.total_steps} <= {self.warmup_steps})")

    def module_learning_rates(self) -> dict[str, float]:
        """Learning rate by module: "vision", "projector", "decoder"; 0 means frozen."""
        def or_default(rate: float | None) -> float:
            return self.learning_rate if rate is None else rate

        return {"vision": or_default(self.vision_learning_rate),
                "projector": or_default(self.projector_learning_rate),
                "decoder": 0.0 if self.freeze_decoder else self.learning_rate}
