"""RewardService <-> engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc

from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput
from rollplex.reward.engine import Sample, Scored
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc


class Scorer(Protocol):
    """RewardEngine, or what stands in for it."""

    def score(self, samples: Sequence[Sample]) -> list[Scored]: ...


class RewardServicer(reward_service_pb2_grpc.RewardServiceServicer):
    """Rules run in a thread, so that a long batch delays nobody else's call."""

    def __init__(self, name: str, engine: Scorer) -> None:
        self._name, self._engine = name, engine

    async def Score(self, request: reward_service_pb2.ScoreRequest,
                    context: grpc.aio.ServicerContext) -> reward_service_pb2.ScoreResponse:
        if not request.items:
            raise BadInput("a Score request needs at least one item", reason="NO_ITEMS")
        crash_point("reward.score.received")
        samples = [_sample(item) for item in request.items]
        scored = await asyncio.to_thread(self._engine.score, samples)
        crash_point("reward.score.computed")
        return reward_service_pb2.ScoreResponse(scores=[_score(result) for result in scored])

    async def DescribeReward(self, request: reward_service_pb2.DescribeRewardRequest,
                             context: grpc.aio.ServicerContext) -> reward_service_pb2.DescribeRewardResponse:
        return reward_service_pb2.DescribeRewardResponse(name=self._name, max_batch_size=0)


def _sample(item: reward_service_pb2.ScoreItem) -> Sample:
    return Sample(response=item.response_text,
                  ground_truth=item.ground_truth if item.HasField("ground_truth") else None,
                  problem_type=item.problem_type if item.HasField("problem_type") else None)


def _score(scored: Scored) -> reward_service_pb2.Score:
    return reward_service_pb2.Score(value=scored.value, error=scored.error, parts=scored.parts)
