"""Wires a rollout process: config -> ranks -> token engine -> engine -> server."""

from __future__ import annotations

import torch

from rollplex.core.topology import device_name
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.memory.host_driver import HostDriver
from rollplex.model import ActorLayout, init_tensor_parallel, read_model_config
from rollplex.rollout.config import RolloutConfig
from rollplex.rollout.copies import ShardCopy, SnapshotCopies
from rollplex.rollout.engine import RolloutEngine
from rollplex.rollout.replica import Replica
from rollplex.rollout.servicer import add_rollout
from rollplex.rollout.shard import RankShard
from rollplex.rollout.torch_engine import TorchEngine
from rollplex.rollout.workers import Workers, process_name
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run


def build_engine(config: RolloutConfig, replica: int) -> RolloutEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count; with one rank after
    init_tensor_parallel, with more this joins the group."""
    workers = Workers(config, replica)
    workers.start()
    try:
        shard = build_shard(config, replica, 0)
        model = read_model_config(config.model.checkpoint)
        processor = PromptProcessor.load(config.model.checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
        reader = PromptReader(shard.session, shard.session.driver, processor, model)
        ranks = Replica(shard, workers, config.mesh, process_name(replica, 0))
    except BaseException:
        workers.kill()
        raise
    tokens = TorchEngine(ranks, reader, model, max_rows=config.rollout.max_rows)
    return RolloutEngine(tokens, config.mesh.rollout_tensor_parallel, snapshot_copies(config, replica, shard.session))


def snapshot_copies(config: RolloutConfig, replica: int, session: BrokerSession) -> SnapshotCopies | None:
    """For a replica on devices of its own; None where it shares the trainer's."""
    topology = config.mesh.topology
    if not topology.own_replicas:
        return None
    pairs = zip(topology.source(replica), topology.replica_devices(replica))
    return SnapshotCopies(session, session.driver, [ShardCopy(device_name(source), device_name(own)) for source, own in pairs])


def build_shard(config: RolloutConfig, replica: int, rank: int) -> RankShard:
    """One rank's part, also of a worker."""
    torch.set_num_threads(config.rollout.threads)
    model, driver = read_model_config(config.model.checkpoint), HostDriver()
    topology = config.mesh.topology
    layout = ActorLayout.build(model, topology.rollout_tp, config.model.dtype, topology.train_tp)
    session = BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket,
                                    process=process_name(replica, rank), role="rollout", driver=driver)
    return RankShard(session, driver, model, layout, device_name(topology.replica_devices(replica)[rank]))


def serve_forever(config: RolloutConfig, replica: int) -> None:
    """Blocks until SIGTERM."""
    name = process_name(replica, 0)
    configure_logging(name)

    def build() -> RolloutEngine:
        if config.mesh.rollout_tensor_parallel == 1:
            init_tensor_parallel(0, 1)
        return build_engine(config, replica)

    run(serve_engine(name, config.mesh.address(name), build, add_rollout, drain_timeout_s=config.mesh.drain_timeout_s))
