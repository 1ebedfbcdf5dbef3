"""Loss options against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from rollplex.core.config import LossConfig
from rollplex.core.errors import BadInput
from rollplex.core.work import LossScale
from rollplex.trainer.loss import Tokens, importance_weights, kl_estimate, policy_ratio, token_losses, token_weights
from rollplex.trainer.metrics import MetricSums

LOG = math.log


def tokens(ratios, advantages, lengths, **more) -> Tokens:
    """Old log-probabilities are -1; the current ones give the ratios."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    current = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return Tokens(current, torch.tensor(advantages, dtype=torch.float64), tuple(lengths), old_logprobs=old, **more)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_clipping_is_one_sided_and_asymmetric():
    batch = tokens([1.5, 0.5, 1.5, 0.5], [2.0, -2.0], [2, 2])
    losses = token_losses(batch, LossConfig(clip_low=0.2, clip_high=0.3))
    # A > 0: min(r, 1.3); A < 0: max(r, 0.8)
    torch.testing.assert_close(losses.total, vector(-2 * 1.3, -2 * 0.5, 2 * 1.5, 2 * 0.8))
    assert losses.clipped.tolist() == [True, False, False, True]
    losses.total.sum().backward()
    torch.testing.assert_close(batch.logprobs.grad, vector(0, -1.0, 3.0, 0))


def test_dual_clip_bounds_negative_advantages_only():
    batch = tokens([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], [1, 1, 1])
    losses = token_losses(batch, LossConfig(dual_clip=3.0))
    torch.testing.assert_close(losses.total, vector(3.0, 2.0, -1.2))
    assert losses.clipped_lower.tolist() == [True, False, False]


def test_ratio_without_old_log_probabilities_is_exactly_one():
    current = torch.tensor([-0.3, -7.1, -1e-3], requires_grad=True)
    batch = Tokens(current, torch.tensor([0.5]), (3,))
    assert policy_ratio(batch, "token").tolist() == [1.0] * 3
    assert policy_ratio(batch, "sequence").tolist() == [1.0] * 3
    token_losses(batch, LossConfig()).total.sum().backward()
    torch.testing.assert_close(current.grad, torch.full((3,), -0.5))


def test_sequence_ratio_is_the_geometric_mean_of_the_sample():
    batch = tokens([2.0, 8.0, 3.0], [1.0, 1.0], [2, 1])
    torch.testing.assert_close(policy_ratio(batch, "sequence").detach(), vector(4.0, 4.0, 3.0))


@pytest.mark.parametrize(("estimator", "expected"), [
    ("k1", [LOG(2), -LOG(4)]),
    ("k2", [LOG(2) ** 2 / 2, LOG(4) ** 2 / 2]),
    ("k3", [0.5 - 1 + LOG(2), 4 - 1 - LOG(4)]),
])
def test_kl_estimators(estimator, expected):
    current, reference = vector(LOG(0.5), LOG(0.1)), vector(LOG(0.25), LOG(0.4))
    torch.testing.assert_close(kl_estimate(current, reference, estimator), vector(*expected))


def test_kl_is_added_after_the_importance_weight():
    batch = tokens([1.0], [1.0], [1], reference_logprobs=vector(-1 - LOG(2)), rollout_logprobs=vector(-1 + LOG(2)))
    losses = token_losses(batch, LossConfig(kl_coef=0.1, kl_estimator="k1", importance_correction="token"))
    torch.testing.assert_close(losses.total, vector(-0.5 + 0.1 * LOG(2)))


def test_importance_weights_are_truncated_and_carry_no_gradient():
    batch = tokens([1.0] * 3, [1.0, 1.0], [2, 1], rollout_logprobs=vector(-1 - LOG(1.5), -1 - LOG(1.5), -1 + LOG(4)))
    torch.testing.assert_close(importance_weights(batch, "token", 2.0), vector(1.5, 1.5, 0.25))
    torch.testing.assert_close(importance_weights(batch, "sequence", 2.0), vector(2.0, 2.0, 0.25))
    assert not importance_weights(batch, "token", 2.0).requires_grad


@pytest.mark.parametrize(("aggregation", "expected"), [
    ("seq-mean-token-mean", [1 / 8, 1 / 8, 1 / 4]),
    ("token-mean", [1 / 10] * 3),
    ("seq-mean-token-sum-norm", [1 / 64] * 3),
])
def test_aggregation(aggregation, expected):
    batch = tokens([1.0] * 3, [1.0, 1.0], [2, 1])
    weights = token_weights(batch, aggregation, LossScale(sample_count=4, token_count=10, max_response_tokens=16))
    torch.testing.assert_close(weights, vector(*expected))


def test_refusals():
    batch = tokens([1.0], [1.0], [1])
    with pytest.raises(BadInput, match="reference"):
        token_losses(batch, LossConfig(kl_coef=0.1))
    with pytest.raises(BadInput, match="rollout"):
        token_losses(batch, LossConfig(importance_correction="token"))
    with pytest.raises(BadInput, match="token_count is 0"):
        token_weights(batch, "token-mean", LossScale(1, 0, 1))


def test_metrics_are_the_same_however_the_samples_are_split():
    config = LossConfig(kl_coef=0.1, importance_correction="token", dual_clip=3.0)
    scale = LossScale(2, 3, 16)
    whole = tokens([1.5, 4.0, 0.9], [1.0, -1.0], [1, 2], reference_logprobs=vector(-1.1, -0.9, -2),
                   rollout_logprobs=vector(-1.2, -1, -0.5), entropy=vector(1, 2, 3))
    sums = [MetricSums(), MetricSums()]
    for start, stop, sample in ((0, 1, 0), (1, 3, 1)):
        cut = {name: getattr(whole, name)[start:stop]
               for name in ("logprobs", "old_logprobs", "reference_logprobs", "rollout_logprobs", "entropy")}
        part = replace(whole, **cut, advantages=whole.advantages[sample:sample + 1], lengths=(stop - start,))
        sums[0].add(part, token_losses(part, config), token_weights(part, config.aggregation, scale))
    sums[1].add(whole, token_losses(whole, config), token_weights(whole, config.aggregation, scale))
    split, joined = MetricSums(), sums[1].result()
    split.merge(sums[0])
    assert split.result() == pytest.approx(joined, rel=1e-12)
    assert joined["actor/entropy"] == 2.0
    assert joined["actor/ppo_kl"] == pytest.approx(-(LOG(1.5) + LOG(4.0) + LOG(0.9)) / 3)
    assert joined["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert joined["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    assert joined["rollout_corr/kl"] == pytest.approx((-0.2 + 0 + 0.5) / 3)
    assert joined["sampling/sampling_logp_difference/max"] == pytest.approx(0.5)
    differences = torch.tensor([math.exp(-1) - math.exp(x) for x in (-1.2, -1, -0.5)]).abs()
    assert joined["training/rollout_probs_diff_std"] == pytest.approx(float(differences.std()), rel=1e-5)
