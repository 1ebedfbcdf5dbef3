"""Wiring: keeper, custody, handle socket and gRPC."""

from __future__ import annotations

import logging

from grpc import aio

from rollplex.broker.config import BrokerConfig
from rollplex.broker.engine import Custody
from rollplex.broker.handle_server import HandleServer
from rollplex.broker.hbm import HbmBudget, NoMeter
from rollplex.broker.keeper_link import KeeperLink
from rollplex.broker.mps_clients import client_list
from rollplex.broker.nvml import device_meter
from rollplex.broker.records import NoVault
from rollplex.broker.servicer import BrokerServicer
from rollplex.core.compatibility import config_facts
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.rpc.handles import allow_most_fds
from rollplex.rpc.runtime_dir import prepare_runtime_dir
from rollplex.rpc.server import serve
from rollplex.v1 import memory_broker_service_pb2, memory_broker_service_pb2_grpc

log = logging.getLogger(__name__)


def add_broker(custody: Custody, server: aio.Server) -> list[str]:
    """Adds the servicer; returns its full service name."""
    memory_broker_service_pb2_grpc.add_MemoryBrokerServiceServicer_to_server(BrokerServicer(custody), server)
    return [memory_broker_service_pb2.DESCRIPTOR.services_by_name["MemoryBrokerService"].full_name]


class Broker:
    """All of a broker but its gRPC server. `start` and `close` are the pair; tests serve it inside their process."""

    def __init__(self, config: BrokerConfig) -> None:
        section = config.broker
        self._link = KeeperLink(config.mesh.keeper_socket, timeout_s=section.keeper_timeout_s) if section.keeper else None
        limit = default_host_limit_bytes() if section.host_limit_bytes is None else section.host_limit_bytes
        budget = HbmBudget(config.mesh.hbm_budget_bytes, round(section.unexplained_slack_gib * (1 << 30)),
                           device_meter() if config.mesh.devices == "cuda" else NoMeter())
        self.custody = Custody(self._link or NoVault(), host_limit_bytes=limit, budget=budget,
                               ticket_lifetime_s=section.ticket_lifetime_s, fence_timeout_s=section.fence_timeout_s,
                               reconnect_grace_s=section.reconnect_grace_s, clients=client_list(config.mesh))
        self._handles = HandleServer(config.mesh.handle_socket, self.custody)

    def recover(self) -> None:
        """Takes over what the keeper keeps. Blocking; raises Unavailable when a configured keeper is not there."""
        if self._link is None:
            log.warning("no keeper is configured: slabs end with this process")
            return
        kept = self._link.adopt()
        self._link.follow(self.custody.records)
        for name, reason in self.custody.restore(kept).items():
            log.error("the keeper's %s was left out: %s", name, reason)
        log.info("%d slabs taken over from the keeper", len(self.custody.slabs.by_name))

    async def start(self) -> None:
        self._handles.start()

    async def close(self) -> None:
        await self._handles.close()
        if self._link is not None:
            await self._link.close()
        self.custody.close()


async def main(config: BrokerConfig) -> None:
    """Serves until SIGTERM. A stopped broker's slabs stay with the keeper."""
    allow_most_fds()
    prepare_runtime_dir(config.mesh.runtime_dir)
    broker = Broker(config)
    broker.recover()
    await serve("broker", config.mesh.address("broker"), lambda server: add_broker(broker.custody, server),
                drain_timeout_s=config.mesh.drain_timeout_s, on_ready=broker.start, on_drain=broker.close,
                subjects=config_facts(config.mesh))
