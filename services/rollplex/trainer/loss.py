"""The policy loss of whole samples, as pure functions; metrics are kept as sums in metrics.py.

Formulas: clipped ratio (PPO, arXiv 1707.06347, eq. 7) with clip-higher (DAPO, arXiv 2503.14476, eq. 10), sequence ratio (GSPO,
arXiv 2507.18071, eq. 7), dual clip (arXiv 1912.09729, eq. 5), aggregation of GRPO (arXiv 2402.03300), DAPO (token mean) and
Dr. GRPO (arXiv 2503.20783), KL estimators k1, k2, k3 (J. Schulman, "Approximating KL divergence"), truncated importance weights
of TRL and verl. TRL's GRPOTrainer is the oracle; tests/unit/trainer/test_trl_parity.py runs it.

What the caller passes as LossScale, over ALL samples of the mini-batch, so that a loss is a sum over groups and neither
schedules nor micro-batches change it:
- sample_count: every sample, unscored ones included. TRL turns a None reward into advantage 0 and keeps the sample in its mean.
- token_count: response tokens of every sample, unscored ones included (TRL's num_items_in_batch).
- max_response_tokens: SamplingConfig.max_response_tokens (Dr. GRPO's constant).
An unscored sample adds nothing here: its policy term is 0 as in TRL, and, unlike TRL, neither is its KL term counted.

Legend: T tokens of N samples, packed sample after sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollplex.core.config import LossConfig
from rollplex.core.errors import BadInput
from rollplex.core.work import LossScale
from rollplex.memory.transfer import to_device


@dataclass(frozen=True)
class Tokens:
    """Log-probabilities [T] and what belongs to them. All floating tensors have one dtype, float32 or wider."""

    logprobs: torch.Tensor
    """[T], of the current policy, attached."""
    advantages: torch.Tensor
    """[N]"""
    lengths: tuple[int, ...]
    """Tokens of each of the N samples; their sum is T."""
    old_logprobs: torch.Tensor | None = None
    """[T] of the policy that the ratio is taken against; None: the current one, and the ratio is exactly 1."""
    reference_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    @property
    def old(self) -> torch.Tensor:
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def per_token(self, values_N: torch.Tensor) -> torch.Tensor:
        """[N] -> [T]"""
        counts = to_device(torch.tensor(self.lengths), values_N.device)
        return torch.repeat_interleave(values_N, counts, output_size=sum(self.lengths))

    def sample_sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [N]"""
        return torch.stack([part.sum() for part in values_T.split(self.lengths)])

    def length_tensor(self) -> torch.Tensor:
        """[N] in the log-probabilities' dtype."""
        return to_device(torch.tensor(self.lengths, dtype=self.logprobs.dtype), self.logprobs.device)


@dataclass(frozen=True)
class Losses:
    """Per-token parts [T] of a loss, before aggregation; `total` carries the graph."""

    total: torch.Tensor
    policy: torch.Tensor
    clipped: torch.Tensor
    """bool: the clipped ratio decided."""
    clipped_lower: torch.Tensor
    """bool: the dual clip decided."""
    kl: torch.Tensor | None
    importance: torch.Tensor | None
    """Truncated weights that the policy term was multiplied by."""


def token_losses(tokens: Tokens, config: LossConfig) -> Losses:
    """The per-token objective to minimise: importance * clipped policy term + kl_coef * KL.

    Raises BadInput when log-probabilities that an option needs are absent.
    """
    advantage = tokens.per_token(tokens.advantages)
    ratio = policy_ratio(tokens, config.ratio_level)
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    policy = torch.maximum(plain, bounded)
    clipped = bounded > plain
    clipped_lower = torch.zeros_like(clipped)
    if config.dual_clip:
        floor = -advantage * config.dual_clip
        clipped_lower = (policy > floor) & (advantage < 0)
        policy = torch.where(advantage < 0, torch.minimum(policy, floor), policy)
    importance = None
    if config.importance_correction != "off":
        importance = importance_weights(tokens, config.importance_correction, config.importance_cap)
        policy = policy * importance
    kl, total = None, policy
    if config.kl_coef:
        kl = kl_estimate(tokens.logprobs, _needed(tokens.reference_logprobs, "reference", "kl_coef"), config.kl_estimator)
        total = policy + config.kl_coef * kl
    return Losses(total, policy, clipped, clipped_lower, kl, importance)


def policy_ratio(tokens: Tokens, level: str) -> torch.Tensor:
    """[T]: pi / pi_old of the token, or its geometric mean over the sample (`sequence`), repeated for each token."""
    log_ratio = tokens.logprobs - tokens.old
    if level == "sequence":
        log_ratio = tokens.per_token(tokens.sample_sums(log_ratio) / tokens.length_tensor())
    return log_ratio.exp()


def importance_weights(tokens: Tokens, level: str, cap: float) -> torch.Tensor:
    """[T]: min(pi_old / pi_rollout, cap), without gradient; `sequence` takes the product over the sample (TRL's, verl's)."""
    difference = (tokens.old - _needed(tokens.rollout_logprobs, "rollout", "importance_correction")).detach()
    if level == "sequence":
        difference = tokens.per_token(tokens.sample_sums(difference))
    return difference.exp().clamp(max=cap)


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """[T]: k1 = log(p/r), k2 = log(p/r)^2 / 2, k3 = r/p - 1 - log(r/p), all of KL(p || r) under samples of p."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return (-difference).exp() + difference - 1


def token_weights(tokens: Tokens, aggregation: str, scale: LossScale) -> torch.Tensor:
    """[T]: what a token's loss counts for in the mini-batch's.

    seq-mean-token-mean: 1 / (length of its sample * sample_count). token-mean: 1 / token_count.
    seq-mean-token-sum-norm: 1 / (sample_count * max_response_tokens). Raises BadInput for a denominator below 1.
    """
    for name in ("sample_count", "token_count", "max_response_tokens"):
        if getattr(scale, name) < 1:
            raise BadInput(f"loss scale: {name} is {getattr(scale, name)}; it must be at least 1", reason="BAD_LOSS_SCALE")
    if aggregation == "seq-mean-token-mean":
        return tokens.per_token(1 / (tokens.length_tensor() * scale.sample_count))
    divisor = scale.token_count if aggregation == "token-mean" else scale.sample_count * scale.max_response_tokens
    return torch.full_like(tokens.logprobs, 1 / divisor, requires_grad=False)


def _needed(values: torch.Tensor | None, what: str, option: str) -> torch.Tensor:
    if values is None:
        raise BadInput(f"{option} needs {what} log-probabilities of every sample", reason="MISSING_LOGPROBS")
    return values
