"""[run.ablation]."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """What residency costs when one part of it is taken away (the paper's Figure 8). For measuring only; nothing is computed
    differently."""

    no_state_offload: bool = False
    """FP32 master weights and Adam moments stay in HBM."""
    rollout_resident: bool = False
    """Rollout keeps its keys and values after generation."""
    unchunked_optimizer: bool = False
    """The update takes all parameters as one chunk."""
    no_weight_sharing: bool = False
    """Rollout reads a copy of the snapshot of its own, on the same device."""

    @property
    def any(self) -> bool:
        return self != AblationConfig()
