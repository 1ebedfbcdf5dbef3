"""Rewards: who is registered, and scoring finished samples while others still decode.

A sample that a reward cannot score (down, slow, NaN, too few scores, an error) is *unscored*, never 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import RewardRegistration
from rollplex.core.errors import BadInput, DeadlineExceeded, NotFound, RollplexError, Unavailable
from rollplex.core.tcp_security import TcpSecurity
from rollplex.rpc.channel import aio_channel, check_address
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
PARALLEL_REQUESTS = 4
"""Requests that one reward has open at a time."""
LARGEST_REWARD = 1e30
"""Beyond it variances overflow; such a value is a reward's bug, not a reward."""
DEFAULT_BATCH = 256
"""Items a request when the reward names no limit of its own."""


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """What a reward is told about one finished sample."""

    group_index: int
    sample_index: int
    messages_json: str
    text: str
    token_ids: Sequence[int]
    ground_truth: str | None
    problem_type: str | None
    data_source: str | None
    columns_json: str


@dataclass(frozen=True, slots=True)
class Scored:
    """What one reward said of one sample."""

    value: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


class RewardBook:
    """Registered rewards, kept in the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._rewards: dict[str, RewardRegistration] = {}

    async def load(self) -> None:
        self._rewards = {reward.name: reward for reward in await self._journal.rewards()}

    def all(self) -> list[RewardRegistration]:
        return [self._rewards[name] for name in sorted(self._rewards)]

    async def register(self, reward: RewardRegistration) -> None:
        """Adds or replaces by name. Raises BadInput for a bad name, address, weight or limit."""
        TcpSecurity.current().secures(check_address(reward.address), serving=False)
        if not reward.name or "/" in reward.name:
            raise BadInput(f"reward name {reward.name!r} must not be empty or contain '/'", reason="BAD_REWARD")
        if not math.isfinite(reward.weight):
            raise BadInput(f"reward weight {reward.weight} must be finite", reason="BAD_REWARD")
        if not reward.timeout_s > 0 or reward.retries < 0:
            raise BadInput(f"reward timeout {reward.timeout_s} s must be above 0 and retries {reward.retries} not "
                           "negative", reason="BAD_REWARD")
        await self._journal.put_reward(reward)
        self._rewards[reward.name] = reward

    async def unregister(self, name: str) -> None:
        if name not in self._rewards:
            known = ", ".join(self._rewards) or "none"
            raise NotFound(f"no reward {name!r} is registered (registered: {known})", reason="REWARD_NOT_FOUND")
        await self._journal.delete_reward(name)
        del self._rewards[name]


class RewardClient:
    """One reward service during one iteration: batches what has piled up, retries, and never lets a failure through."""

    def __init__(self, registration: RewardRegistration, run: str, iteration: int) -> None:
        self.registration = registration
        self._run, self._iteration = run, iteration
        self._channel = aio_channel(registration.address)
        self._stub = reward_service_pb2_grpc.RewardServiceStub(self._channel)
        self._limit = asyncio.Semaphore(PARALLEL_REQUESTS)
        self._batch_size = 0

    async def close(self) -> None:
        await self._channel.close()

    async def score(self, items: Sequence[ScoreInput]) -> list[Scored]:
        """One outcome an item, in order."""
        size = await self._describe_batch_size()
        parts = [items[start:start + size] for start in range(0, len(items), size)]
        scored = await asyncio.gather(*(self._score_batch(part) for part in parts))
        return [outcome for part in scored for outcome in part]

    async def _describe_batch_size(self) -> int:
        """Asked once; a reward that does not answer is asked again with the next samples."""
        if self._batch_size:
            return self._batch_size
        try:
            answer = await self._stub.DescribeReward(reward_service_pb2.DescribeRewardRequest(),
                                                     timeout=self.registration.timeout_s)
        except grpc.RpcError:
            return DEFAULT_BATCH
        self._batch_size = answer.max_batch_size or DEFAULT_BATCH
        return self._batch_size

    async def _score_batch(self, items: Sequence[ScoreInput]) -> list[Scored]:
        request = reward_service_pb2.ScoreRequest(run=self._run, iteration=self._iteration,
                                                  items=[_to_item(item) for item in items])
        async with self._limit:
            try:
                response = await self._call(request)
            except RollplexError as error:
                return [Scored(None, error=f"{error.reason}: {error}")] * len(items)
        if len(response.scores) != len(items):
            text = f"BAD_SCORES: {len(response.scores)} scores for {len(items)} samples"
            return [Scored(None, error=text)] * len(items)
        return [_from_score(score) for score in response.scores]

    async def _call(self, request: reward_service_pb2.ScoreRequest) -> reward_service_pb2.ScoreResponse:
        """Repeats what may pass by itself (down, slow), with a doubling pause; raises the last error."""
        pause_s = FIRST_BACKOFF_S
        for left in range(self.registration.retries, -1, -1):
            try:
                return await self._stub.Score(request, timeout=self.registration.timeout_s)
            except grpc.RpcError as error:
                domain_error = error_from_rpc(error)
                if not left or not isinstance(domain_error, Unavailable | DeadlineExceeded):
                    raise domain_error from error
                log.info("reward %s: %s; %d tries left", self.registration.name, domain_error, left)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise Unavailable("no try was made")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all rewards together said of one sample."""

    item: ScoreInput
    reward: float | None
    """Weighted sum; None: unscored."""
    parts: dict[str, float]
    """By reward."""
    error: str
    """Why it is unscored."""


OnScored = Callable[[Sequence[Verdict]], Awaitable[None]]


class RewardDesk:
    """All rewards of one iteration. `push` never waits; `finish` waits for everything pushed."""

    def __init__(self, registrations: Sequence[RewardRegistration], run: str, iteration: int, on_scored: OnScored,
                 on_late: Callable[[str], None]) -> None:
        self._clients = [RewardClient(registration, run, iteration) for registration in registrations]
        self._on_scored, self._on_late = on_scored, on_late
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, items: Sequence[ScoreInput]) -> None:
        task = asyncio.create_task(self._score(items))
        self._tasks.add(task)

    async def finish(self, timeout_s: float) -> None:
        """Waits for everything pushed. What has no score after `timeout_s` stays unscored."""
        if not self._tasks:
            return
        done, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        self._tasks = late
        await asyncio.gather(*done)
        if late:
            self._on_late(f"REWARD_TIMEOUT: rewards did not answer within {timeout_s:g} s; their samples are unscored")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _score(self, items: Sequence[ScoreInput]) -> None:
        by_reward = await asyncio.gather(*(client.score(items) for client in self._clients))
        verdicts = []
        for index, item in enumerate(items):
            total, parts, errors = 0.0, {}, []
            for client, outcomes in zip(self._clients, by_reward):
                outcome, name = outcomes[index], client.registration.name
                parts.update({f"{name}/{part}": value for part, value in outcome.parts.items()})
                if outcome.value is None:
                    errors.append(f"{name}: {outcome.error}")
                else:
                    parts[name] = outcome.value
                    total += client.registration.weight * outcome.value
            verdicts.append(Verdict(item, None if errors else total, parts, "; ".join(errors)))
        await self._on_scored(verdicts)


async def describe(registration: RewardRegistration, timeout_s: float) -> str:
    """Why the reward does not answer; empty when it does."""
    try:
        channel = aio_channel(registration.address)
    except BadInput as error:  # kept from a time when the mesh was allowed to call there
        return str(error)
    async with channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        try:
            await stub.DescribeReward(reward_service_pb2.DescribeRewardRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error_from_rpc(error))
    return ""


def _to_item(item: ScoreInput) -> reward_service_pb2.ScoreItem:
    return reward_service_pb2.ScoreItem(
        group_index=item.group_index, sample_index=item.sample_index, messages_json=item.messages_json,
        response_text=item.text, response_token_ids=item.token_ids, ground_truth=item.ground_truth,
        problem_type=item.problem_type, data_source=item.data_source, columns_json=item.columns_json)


def _from_score(score: reward_service_pb2.Score) -> Scored:
    parts = {name: value for name, value in score.parts.items() if math.isfinite(value)}
    if not score.HasField("value"):
        return Scored(None, parts, score.error or "NO_SCORE: the reward gave no value")
    if not math.isfinite(score.value) or abs(score.value) > LARGEST_REWARD:
        return Scored(None, parts, f"BAD_SCORES: the reward gave {score.value}")
    return Scored(score.value, parts)
