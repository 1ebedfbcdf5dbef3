"""Wiring: journal, broker session, decoder, processor, engines, rewards; then serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from grpc import aio

from rollplex.coordinator.checkpoints import RunCheckpoints
from rollplex.coordinator.compatibility import Admission
from rollplex.coordinator.config import CoordinatorConfig
from rollplex.coordinator.engine import Coordinator
from rollplex.coordinator.intake import Intake
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.planner import Planner
from rollplex.coordinator.recordings import Recordings
from rollplex.coordinator.records import RewardRegistration
from rollplex.coordinator.rewards import RewardBook
from rollplex.coordinator.servicer import CoordinatorServicer
from rollplex.core.compatibility import config_facts
from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.shapes import read_shapes
from rollplex.data.decoder import MediaDecoder
from rollplex.data.processor import PromptProcessor
from rollplex.memory.client import BrokerSession
from rollplex.rpc.runtime_dir import prepare_runtime_dir
from rollplex.rpc.server import configure_logging, run, serve
from rollplex.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

BROKER_TIMEOUT_S = 30.0


def service_names(mesh: MeshSection, config: CoordinatorConfig) -> list[str]:
    """Every service of the mesh, in the order of an iteration."""
    names = ["coordinator", "broker"]
    names += [f"{role}-{rank}" for role in ("rollout", "reference", "trainer") for rank in range(mesh.ranks(role))]
    return [*names, "reward"] if config.builtin_reward else names


async def build(mesh: MeshSection, model: ModelSection, config: CoordinatorConfig) -> tuple[Coordinator, Callable]:
    """The coordinator, ready to start, and what closes it."""
    loop = asyncio.get_running_loop()

    def connect() -> BrokerSession:
        return BrokerSession.connect(mesh.address("broker"), mesh.handle_socket, process="coordinator", role="coordinator",
                                     timeout_s=BROKER_TIMEOUT_S)

    async with contextlib.AsyncExitStack() as stack:
        session = await loop.run_in_executor(None, connect)
        stack.push_async_callback(asyncio.to_thread, session.close)
        decoder = MediaDecoder(config.decode_workers)
        stack.push_async_callback(decoder.close)
        journal = Journal(config.journal or mesh.runtime_dir / "journal.sqlite", config.journal_full_wait_s)
        recordings = Recordings.open(journal, config.replay_journal)
        stack.push_async_callback(recordings.close)
        shapes = await loop.run_in_executor(None, read_shapes, model.checkpoint)
        peers = Mesh(mesh, session, Planner(mesh, shapes, model.dtype), Admission(config_facts(mesh, model)))
        await decoder.start()
        processor = await loop.run_in_executor(
            None, lambda: PromptProcessor.load(model.checkpoint, max_prompt_tokens=model.max_prompt_tokens))
        intake = Intake(session, decoder, processor, config.media, config.media_roots, peers.broker_thread)
        checkpoints = RunCheckpoints(peers, config.checkpoints or mesh.checkpoints_dir)
        coordinator = Coordinator(peers, journal, intake, RewardBook(journal), recordings, checkpoints)
        stack.push_async_callback(coordinator.close)
        return coordinator, stack.pop_all().aclose


async def register_builtin(coordinator: Coordinator, mesh: MeshSection, config: CoordinatorConfig) -> None:
    """The mesh's own reward service counts from the start, unless its name is taken."""
    known = {reward.name for reward in coordinator.rewards.all()}
    if config.builtin_reward and config.builtin_reward not in known:
        await coordinator.rewards.register(RewardRegistration(
            config.builtin_reward, mesh.address("reward"), config.builtin_reward_weight))


async def main(mesh: MeshSection, model: ModelSection, config: CoordinatorConfig) -> None:
    prepare_runtime_dir(mesh.runtime_dir)
    coordinator, close = await build(mesh, model, config)

    def add(server: aio.Server) -> list[str]:
        servicer = CoordinatorServicer(coordinator, mesh, service_names(mesh, config))
        coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
        return [coordinator_service_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name]

    async def ready() -> None:
        await coordinator.start()
        await register_builtin(coordinator, mesh, config)

    await serve("coordinator", mesh.address("coordinator"), add, drain_timeout_s=mesh.drain_timeout_s,
                on_ready=ready, on_drain=close, subjects=config_facts(mesh, model))


def serve_forever(mesh: MeshSection, model: ModelSection, config: CoordinatorConfig) -> None:
    configure_logging("coordinator")
    run(main(mesh, model, config))
