"""Wires a rollout process: config -> ranks -> token engine -> engine -> server."""

from __future__ import annotations

import importlib.util

import torch

from rollplex.core.compatibility import config_facts
from rollplex.core.errors import BadInput
from rollplex.core.imports import uncollected
from rollplex.core.topology import torch_device
from rollplex.data.processor import PromptProcessor
from rollplex.engine.hbm_share import bound_allocator
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, ModelConfig, init_tensor_parallel, read_model_config
from rollplex.rollout.config import RolloutConfig
from rollplex.rollout.copies import ShardCopy, SnapshotCopies
from rollplex.rollout.engine import RolloutEngine, TokenEngine
from rollplex.rollout.replica import Replica
from rollplex.rollout.servicer import add_rollout
from rollplex.rollout.shard import RankShard
from rollplex.rollout.torch_engine import TorchEngine
from rollplex.rollout.workers import Workers, process_name
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run

GIB = 1 << 30


def build_engine(config: RolloutConfig, replica: int) -> RolloutEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count; the `torch` engine with
    one rank after init_tensor_parallel, with more this joins the group."""
    build = _build_vllm if config.rollout.engine == "vllm" else _build_torch
    model = read_model_config(config.model.checkpoint)
    processor = PromptProcessor.load(config.model.checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    tokens, session = build(config, replica, model, processor)
    _bound_allocator(config, replica, 0)
    pool = round(config.rollout.vllm.kv_cache_gib * GIB) if config.rollout.engine == "vllm" else 0
    return RolloutEngine(tokens, config.mesh.rollout_tensor_parallel, snapshot_copies(config, replica, session), pool)


def _build_torch(config: RolloutConfig, replica: int, model: ModelConfig, processor: PromptProcessor
                 ) -> tuple[TokenEngine, BrokerSession]:
    workers = Workers(config, replica)
    workers.start()
    try:
        shard = build_shard(config, replica, 0)
        # Further ranks get a prompt by way of host memory.
        alone = config.mesh.rollout_tensor_parallel == 1
        reader = PromptReader(shard.session, processor, model, torch_device(shard.device) if alone else "cpu")
        ranks = Replica(shard, workers, config.mesh, process_name(replica, 0))
    except BaseException:
        workers.kill()
        raise
    return TorchEngine(ranks, reader, model, max_rows=config.rollout.max_rows), shard.session


def snapshot_copies(config: RolloutConfig, replica: int, session: BrokerSession) -> SnapshotCopies:
    """To devices of its own, or beside the trainer's slabs, if the run asks for that."""
    topology = config.mesh.topology
    pairs = zip(topology.source(replica), topology.replica_devices(replica))
    return SnapshotCopies(session, [ShardCopy(topology.device_name(source), topology.device_name(own)) for source, own in pairs])


def _build_vllm(config: RolloutConfig, replica: int, model: ModelConfig, processor: PromptProcessor
                ) -> tuple[TokenEngine, BrokerSession]:
    """Imports vLLM, in the environment that it needs."""
    if importlib.util.find_spec("vllm") is None:
        raise BadInput("rollout.engine is vllm, which is not installed here; docs/vllm.md says how", reason="NO_VLLM")
    from rollplex.rollout.vllm_internals import set_environment

    set_environment(config.mesh.collective_timeout_s)
    with uncollected():
        from rollplex.rollout.vllm_engine import VllmEngine

    torch.set_num_threads(config.rollout.threads)
    session = _connect(config, process_name(replica, 0))
    try:
        topology = config.mesh.topology
        # Where vLLM computes in processes of its own, this one has a context for patches: the host takes 20 times as long.
        device = torch_device(topology.device_name(topology.replica_devices(replica)[0]))
        return VllmEngine(session, PromptReader(session, processor, model, device), model, config, replica), session
    except BaseException:
        session.close()
        raise


def build_shard(config: RolloutConfig, replica: int, rank: int) -> RankShard:
    """One rank's part, also of a worker."""
    torch.set_num_threads(config.rollout.threads)
    model, session = read_model_config(config.model.checkpoint), _connect(config, process_name(replica, rank))
    topology = config.mesh.topology
    layout = ActorLayout.build(model, topology.rollout_tp, config.model.dtype, topology.train_tp)
    if rank:
        _bound_allocator(config, replica, rank)
    return RankShard(session, model, layout, topology.device_name(topology.replica_devices(replica)[rank]))


def _bound_allocator(config: RolloutConfig, replica: int, rank: int) -> None:
    """Of the process that is this rank. vLLM's workers that are processes of their own are without this bound."""
    topology = config.mesh.topology
    device = torch.device(torch_device(topology.device_name(topology.replica_devices(replica)[rank])))
    bound_allocator(device, budget_gib=config.mesh.hbm_budget_gib, share_gib=config.rollout.hbm_share_gib)


def _connect(config: RolloutConfig, process: str) -> BrokerSession:
    return BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket, process=process, role="rollout")


def serve_forever(config: RolloutConfig, replica: int) -> None:
    """Blocks until SIGTERM."""
    name = process_name(replica, 0)
    configure_logging(name)

    def build() -> RolloutEngine:
        if config.rollout.engine == "torch" and config.mesh.rollout_tensor_parallel == 1:
            init_tensor_parallel(0, 1)
        return build_engine(config, replica)

    run(serve_engine(name, config.mesh.address(name), build, add_rollout, drain_timeout_s=config.mesh.drain_timeout_s,
                     config=config_facts(config.mesh, config.model)))
