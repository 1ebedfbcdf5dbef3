"""Wires the built-in reward: config -> engine -> servicer -> server."""

from __future__ import annotations

import grpc

from rollplex.core.errors import BadInput
from rollplex.reward.config import RewardConfig
from rollplex.reward.engine import RewardEngine
from rollplex.reward.servicer import RewardServicer, Scorer
from rollplex.rpc.server import configure_logging, run, serve
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc

DRAIN_TIMEOUT_S = 10.0

SERVICE_NAME = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


async def serve_rewards(config: RewardConfig) -> None:
    """Serves until SIGTERM. Raises BadInput for an address that is wrong or in use."""
    await serve_with(RewardEngine(config.accuracy_weight, config.format_weight), config)


async def serve_with(engine: Scorer, config: RewardConfig) -> None:
    """As `serve_rewards`, with another engine."""
    if config.address is None:
        raise BadInput("the reward service has no address", reason="ADDRESS_MISSING")
    servicer = RewardServicer(config.name, engine)

    def add_servicers(server: grpc.aio.Server) -> list[str]:
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
        return [SERVICE_NAME]

    drain_timeout_s = DRAIN_TIMEOUT_S if config.drain_timeout_s is None else config.drain_timeout_s
    await serve("reward", config.address, add_servicers, drain_timeout_s=drain_timeout_s)


def serve_forever(config: RewardConfig) -> None:
    """Blocks until SIGTERM."""
    configure_logging("reward")
    run(serve_rewards(config))
