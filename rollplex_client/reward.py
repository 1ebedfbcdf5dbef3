"""Turns a Python function of TRL's or verl's signature into a reward that a run can be pointed at.

    from rollplex_client.reward import serve_reward

    def shorter_is_better(completions, completion_ids, **columns):
        return [-len(ids) / 512 for ids in completion_ids]

    serve_reward(shorter_is_better, "unix:/tmp/shorter/reward.sock")

or, without a line of code, `python -m rollplex_client.reward file.py:function --address unix:/tmp/shorter/reward.sock`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollplex.core.errors import BadInput, RollplexError
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc
from rollplex_client._reward_function import RewardFunction
from rollplex_client._reward_load import load_function

if TYPE_CHECKING:
    from grpc import aio

__all__ = ["RewardFunction", "serve_reward", "serve_reward_async"]

SERVICE_NAME = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


def serve_reward(fn: Callable[..., Any], address: str, name: str | None = None, max_batch_size: int = 0, *,
                 threads: int = 8, drain_timeout_s: float = 10.0) -> None:
    """Serves `fn` until SIGTERM or Ctrl-C. Call it in the main thread.

    `address` is `unix:/path` (in a folder closed to other users) or `host:port`. `name` is what the reward calls
    itself, by default the function's name. `max_batch_size` is the most samples a call of `fn` gets, 0 for no limit.
    A function that is not async runs in up to `threads` threads at a time; 1 for one that is not thread-safe.

    Raises TypeError for a function of neither signature, BadInput (a ValueError) for an address that is wrong or in
    use, ImportError without uvloop and grpcio-reflection.
    """
    asyncio.run(serve_reward_async(fn, address, name, max_batch_size, threads=threads, drain_timeout_s=drain_timeout_s))


async def serve_reward_async(fn: Callable[..., Any], address: str, name: str | None = None, max_batch_size: int = 0, *,
                             threads: int = 8, drain_timeout_s: float = 10.0) -> None:
    """As `serve_reward`, on the running event loop; cancelling it drains the server."""
    function = RewardFunction(fn, name=name, max_batch_size=max_batch_size, threads=threads)
    chassis = _chassis()

    def add_servicers(server: aio.Server) -> list[str]:
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(_FunctionServicer(function), server)
        return [SERVICE_NAME]

    await chassis.serve(f"reward {function.name}", address, add_servicers, drain_timeout_s=drain_timeout_s)


def _chassis() -> ModuleType:
    try:
        from rollplex.rpc import server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rollplex"):
            raise
        raise ImportError(f"serving a reward needs {error.name}, which the bare client does not install: "
                          "pip install uvloop grpcio-reflection") from error
    return server


class _FunctionServicer(reward_service_pb2_grpc.RewardServiceServicer):
    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    async def Score(self, request: reward_service_pb2.ScoreRequest,
                    context: aio.ServicerContext) -> reward_service_pb2.ScoreResponse:
        return reward_service_pb2.ScoreResponse(scores=await self._function.score(request))

    async def DescribeReward(self, request: reward_service_pb2.DescribeRewardRequest,
                             context: aio.ServicerContext) -> reward_service_pb2.DescribeRewardResponse:
        return reward_service_pb2.DescribeRewardResponse(name=self._function.name,
                                                         max_batch_size=self._function.max_batch_size)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m rollplex_client.reward`; exits with 2 and a line on stderr when it cannot serve."""
    parser = argparse.ArgumentParser(prog="python -m rollplex_client.reward",
                                     description="Serves a Python function as a reward.")
    parser.add_argument("function", metavar="FILE.py[:FUNCTION]",
                        help="or package.module:FUNCTION; FUNCTION is compute_score by default")
    parser.add_argument("--address", required=True, help="unix:/path or host:port")
    parser.add_argument("--name", help="what the reward calls itself; default: the function's name")
    parser.add_argument("--max-batch-size", type=int, default=0, metavar="N", help="samples a call, 0 for no limit")
    parser.add_argument("--threads", type=int, default=8, metavar="N",
                        help="calls at once of a function that is not async")
    arguments = parser.parse_args(argv)
    _chassis().configure_logging("reward")
    try:
        function = load_function(arguments.function)
    except BadInput as error:
        parser.error(str(error))
    try:
        serve_reward(function, arguments.address, arguments.name, arguments.max_batch_size, threads=arguments.threads)
    except (RollplexError, TypeError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
