"""What ranks must agree on where replicas share groups out: those of a replica, about its groups."""

from __future__ import annotations

import pytest

from rollplex.coordinator.agreement import agreed_metrics
from rollplex.coordinator.metrics import merge_suffix_metrics
from rollplex.core.errors import InternalError
from rollplex.core.replicas import Replicas
from rollplex.core.work import SuffixResult


def result(loss: float, tokens: float) -> SuffixResult:
    return SuffixResult({"actor/pg_loss": loss, "actor/entropy": loss, "actor/token_count": tokens} if tokens else {})


def test_each_replicas_loss_is_its_first_ranks_and_all_are_the_mini_batchs():
    """Two replicas of two: ranks 0 and 2, 1 and 3. One that had no group says nothing."""
    by_replica = agreed_metrics([result(0.5, 30), result(0.25, 10), result(0.5, 30), result(0.25, 10)], Replicas(4, 2))
    assert merge_suffix_metrics(by_replica) == {
        "actor/pg_loss": 0.75, "actor/entropy": pytest.approx((0.5 * 30 + 0.25 * 10) / 40), "actor/token_count": 40}
    alone = agreed_metrics([result(0.5, 30), result(0, 0)], Replicas(2, 1))
    assert merge_suffix_metrics(alone) == result(0.5, 30).metrics


@pytest.mark.parametrize(("tensor_size", "named"), [(2, "ranks 1 and 3"), (4, "ranks 0 and 1")])
def test_a_rank_that_computed_another_loss_than_its_replica_is_named(tensor_size, named):
    results = [result(0.5, 30), result(0.25, 10), result(0.5, 30), result(0.26, 10)]
    with pytest.raises(InternalError, match=f"{named} computed different losses"):
        agreed_metrics(results, Replicas(4, tensor_size))
