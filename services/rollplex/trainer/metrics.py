"""Training metrics as sums over tokens, merged over micro-batches and groups, under the names of verl and TRL.

They stay where the tokens are until somebody asks for numbers, so that a group's work is ordered without waiting for the GPU.

Legend: T tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from rollplex.trainer.loss import Losses, Tokens

_SUM, _MAX, _MIN = range(3)


@dataclass
class MetricSums:
    """`add` and `merge`, then `result`. Everything is float64; nothing is divided before the end."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)
    token_count: int = 0
    rollout_token_count: int = 0
    """Tokens whose rollout log-probability is known."""
    sample_count: int = 0
    pending: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)
    """(_SUM, _MAX or _MIN, name, scalar) in order, not in the dicts above yet."""

    @torch.no_grad()
    def add(self, tokens: Tokens, losses: Losses, weights_T: torch.Tensor) -> None:
        """The share of some samples. `weights_T` are the loss's, so that actor/pg_loss adds up to the loss itself."""
        self.token_count += sum(tokens.lengths)
        self.sample_count += len(tokens.lengths)
        self._sum("pg_loss", losses.policy * weights_T)
        if losses.kl is not None:
            self._sum("kl_loss", losses.kl * weights_T)
            self._sum("kl", losses.kl)
        self._sum("ppo_kl", tokens.old - tokens.logprobs)
        self._sum("clipped", losses.clipped)
        self._sum("clipped_lower", losses.clipped_lower)
        if tokens.entropy is not None:
            self._sum("entropy", tokens.entropy)
        if tokens.rollout_logprobs is not None:
            self._add_mismatch(tokens.old.double(), tokens.rollout_logprobs.double())
        if losses.importance is not None:
            self._sum("importance", losses.importance)
            self._extremes("importance", losses.importance)

    def merge(self, other: MetricSums) -> None:
        """Adds `other`'s, settled or not."""
        for kind, values in ((_SUM, other.sums), (_MAX, other.maxima), (_MIN, other.minima)):
            for name, value in values.items():
                self._count(kind, name, value)
        self.pending += other.pending
        self.token_count += other.token_count
        self.rollout_token_count += other.rollout_token_count
        self.sample_count += other.sample_count

    def result(self) -> dict[str, float]:
        """Metrics by public name; the host waits here for what they are made of.

        actor/pg_loss and actor/kl_loss are shares of the mini-batch's loss and add up over commands; the rest are means (or
        extremes) over tokens, to be weighted by actor/token_count. Empty without a token.
        """
        self._settle()
        if not self.token_count:
            return {}
        count = self.token_count
        found = {
            "actor/pg_loss": self.sums["pg_loss"],
            "actor/ppo_kl": self.sums["ppo_kl"] / count,
            "actor/pg_clipfrac": self.sums["clipped"] / count,
            "actor/pg_clipfrac_lower": self.sums["clipped_lower"] / count,
            "actor/token_count": float(count),
            "actor/sample_count": float(self.sample_count),
        }
        if "kl" in self.sums:
            found["actor/kl_loss"] = self.sums["kl_loss"]
            found["actor/kl"] = self.sums["kl"] / count
        if "entropy" in self.sums:
            found["actor/entropy"] = self.sums["entropy"] / count
        if "importance" in self.sums:
            name = "sampling/importance_sampling_ratio"
            found[f"{name}/mean"] = self.sums["importance"] / count
            found[f"{name}/min"], found[f"{name}/max"] = self.minima["importance"], self.maxima["importance"]
        if self.rollout_token_count:
            found.update(self._mismatch())
        return found

    def _add_mismatch(self, old_T: torch.Tensor, rollout_T: torch.Tensor) -> None:
        """Trainer against rollout, of the same tokens under the same snapshot."""
        self.rollout_token_count += old_T.numel()
        difference = old_T - rollout_T
        probability = (old_T.exp() - rollout_T.exp()).abs()
        self._sum("probability", probability)
        self._sum("probability_squared", probability.square())
        self._extremes("probability", probability)
        self._sum("logp_difference", difference.abs())
        self._extremes("logp_difference", difference.abs())
        self._sum("rollout_kl", -difference)
        self._sum("rollout_k3", difference.exp() - difference - 1)

    def _mismatch(self) -> dict[str, float]:
        count = self.rollout_token_count
        mean = self.sums["probability"] / count
        variance = (self.sums["probability_squared"] - count * mean * mean) / max(count - 1, 1)
        return {
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": self.maxima["probability"],
            "training/rollout_probs_diff_std": math.sqrt(max(variance, 0.0)),
            "rollout_corr/kl": self.sums["rollout_kl"] / count,
            "rollout_corr/k3_kl": self.sums["rollout_k3"] / count,
            "sampling/sampling_logp_difference/mean": self.sums["logp_difference"] / count,
            "sampling/sampling_logp_difference/max": self.maxima["logp_difference"],
        }

    def _sum(self, name: str, values_T: torch.Tensor) -> None:
        self.pending.append((_SUM, name, values_T.sum(dtype=torch.float64)))

    def _extremes(self, name: str, values_T: torch.Tensor) -> None:
        self.pending.append((_MAX, name, values_T.max().double()))
        self.pending.append((_MIN, name, values_T.min().double()))

    def _settle(self) -> None:
        """One transfer, whatever has been added."""
        pending, self.pending = self.pending, []
        values = torch.stack([scalar for _, _, scalar in pending]).tolist() if pending else []
        for (kind, name, _), value in zip(pending, values, strict=True):
            self._count(kind, name, value)

    def _count(self, kind: int, name: str, value: float) -> None:
        if kind == _SUM:
            self.sums[name] += value
        elif kind == _MAX:
            self.maxima[name] = max(value, self.maxima.get(name, -math.inf))
        else:
            self.minima[name] = min(value, self.minima.get(name, math.inf))
