"""Serving an engine: owner thread, command board, PhaseService, drain. Rollout, reference and trainer share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from grpc import aio

from rollplex.core.compatibility import LAYOUT, Facts
from rollplex.rpc.last_words import end_when_fatal
from rollplex.rpc.phase_servicer import EngineHost, PhaseEngine, PhaseServicer
from rollplex.rpc.server import RunningServer, serve, start_server
from rollplex.v1 import phase_service_pb2, phase_service_pb2_grpc

AddRole = Callable[[aio.Server, EngineHost], str]
"""Adds the role's own servicer and returns its full service name."""
WarmUp = Callable[[Callable[[], bool]], None]
"""What an engine does before its first command, if there is time: it is told whether to stop."""


def add_engine(host: EngineHost, add_role: AddRole) -> Callable[[aio.Server], list[str]]:
    """An AddServicers for PhaseService and the role's service."""
    def add(server: aio.Server) -> list[str]:
        phase_service_pb2_grpc.add_PhaseServiceServicer_to_server(PhaseServicer(host), server)
        return [phase_service_pb2.DESCRIPTOR.services_by_name["PhaseService"].full_name, add_role(server, host)]

    return add


async def serve_engine(name: str, address: str, build: Callable[[], PhaseEngine], add_role: AddRole, *,
                       drain_timeout_s: float, config: Mapping[str, Facts], warm_up: WarmUp | None = None) -> None:
    """Builds the engine on its owner thread, serves it until SIGTERM, then closes it there. `config`: what it was configured
    with, of core.compatibility.config_facts. `warm_up` runs there once the address is ours, while nobody waits yet, and raises
    nothing; what comes meanwhile waits for it."""
    owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-owner")
    loop = asyncio.get_running_loop()
    engine = await loop.run_in_executor(owner, build)
    host = EngineHost(engine, owner, end_when_fatal)
    stopping = threading.Event()

    async def begin() -> None:
        if warm_up is not None:
            owner.submit(warm_up, stopping.is_set)

    async def close() -> None:
        stopping.set()
        host.abort_all()
        await loop.run_in_executor(owner, engine.close)
        owner.shutdown()

    await serve(name, address, add_engine(host, add_role), drain_timeout_s=drain_timeout_s, on_ready=begin,
                on_drain=close, subjects={**config, LAYOUT: engine.layout_facts})


async def start_engine(name: str, address: str, engine: PhaseEngine, add_role: AddRole) -> RunningServer:
    """An engine served inside this process, for tests and benchmarks. The caller drains it."""
    host = EngineHost(engine, ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-owner"))
    running = await start_server(name, address, add_engine(host, add_role), {LAYOUT: engine.layout_facts})
    await running.ready()
    return running
