"""The demo's control `shuffle-rewards`: another reward's values, handed to the wrong samples.

The values keep their distribution and lose what they say about a sample. Parts ("accuracy") stay with their sample, so
what is measured is the truth. Samples come in whatever batches finish together, down to one; so values are shuffled
through a pool of earlier ones, each being handed out once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence

from grpc import aio

from rollplex.rpc.channel import aio_channel
from rollplex.rpc.server import configure_logging, serve
from rollplex.v1 import reward_service_pb2 as pb
from rollplex.v1.reward_service_pb2_grpc import (
    RewardServiceServicer,
    RewardServiceStub,
    add_RewardServiceServicer_to_server,
)

NAME = "shuffled reward"
READY = "ready"


class ValueShuffler:
    """A stream of values in, the same values in another order out."""

    def __init__(self, seed: int, pool_size: int = 128) -> None:
        self._random = random.Random(seed)
        self._pool: list[float] = []
        self._pool_size = pool_size

    def shuffle(self, values: Sequence[float]) -> list[float]:
        """As many values as were given. Until the pool is full, values are also lent out before they leave it."""
        mixed = list(values)
        self._random.shuffle(mixed)
        out = []
        for value in mixed:
            if len(self._pool) < self._pool_size:
                self._pool.append(value)
                out.append(self._random.choice(self._pool))
            else:
                place = self._random.randrange(self._pool_size)
                out.append(self._pool[place])
                self._pool[place] = value
        return out


class ShufflingServicer(RewardServiceServicer):
    """Asks the true reward and passes its answers on with the values shuffled; unscored samples stay unscored."""

    def __init__(self, upstream: RewardServiceStub, shuffler: ValueShuffler) -> None:
        self._upstream, self._shuffler = upstream, shuffler

    async def Score(self, request: pb.ScoreRequest, context: aio.ServicerContext) -> pb.ScoreResponse:
        answer = await self._upstream.Score(request, timeout=context.time_remaining())
        scored = [score for score in answer.scores if score.HasField("value")]
        for score, value in zip(scored, self._shuffler.shuffle([score.value for score in scored])):
            score.value = value
        return answer

    async def DescribeReward(self, request: pb.DescribeRewardRequest,
                             context: aio.ServicerContext) -> pb.DescribeRewardResponse:
        return await self._upstream.DescribeReward(request, timeout=context.time_remaining())


async def run(address: str, upstream: str, seed: int) -> None:
    """Serves until SIGTERM; prints READY once it does."""
    async with aio_channel(upstream) as channel:
        servicer = ShufflingServicer(RewardServiceStub(channel), ValueShuffler(seed))

        def add(server: aio.Server) -> list[str]:
            add_RewardServiceServicer_to_server(servicer, server)
            return [pb.DESCRIPTOR.services_by_name["RewardService"].full_name]

        async def ready() -> None:
            print(READY, flush=True)

        await serve(NAME, address, add, on_ready=ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="where to serve, unix:/path or host:port")
    parser.add_argument("--upstream", required=True, help="the true reward")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    configure_logging(NAME)
    asyncio.run(run(arguments.address, arguments.upstream, arguments.seed))


if __name__ == "__main__":
    main()
