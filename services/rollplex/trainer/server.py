"""Wires a trainer process: config -> broker session -> model -> engine -> server."""

from __future__ import annotations

from functools import partial

import torch

from rollplex.core.compatibility import config_facts
from rollplex.core.errors import BadInput
from rollplex.data.processor import PromptProcessor
from rollplex.engine import Communicator, PromptReader, use_device
from rollplex.engine.hbm_share import bound_allocator
from rollplex.engine.prefix_stream import open_prefix_stream
from rollplex.memory.client import BrokerSession
from rollplex.model import (
    ActorLayout,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    read_model_config,
    tensor_parallel_group,
)
from rollplex.model.warmup import warm_up
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run
from rollplex.trainer.actor_slabs import ActorSlabs
from rollplex.trainer.config import TrainerConfig
from rollplex.trainer.engine import TrainerEngine
from rollplex.trainer.servicer import add_trainer


def build_engine(config: TrainerConfig, rank: int) -> TrainerEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count, and after
    init_tensor_parallel(0, 1): ranks meet when they join an epoch."""
    section, checkpoint = config.trainer, config.model.checkpoint
    topology = config.mesh.topology
    size = topology.train_tp
    torch.set_num_threads(section.threads)
    device = use_device(topology.device_name(rank))
    bound_allocator(device, budget_gib=config.mesh.hbm_budget_gib, share_gib=section.hbm_share_gib)
    model_config = read_model_config(checkpoint)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    layout = ActorLayout.build(model_config, topology.rollout_tp, config.model.dtype, size)
    communicator = Communicator("trainer", rank, size, config.mesh.rendezvous_dir,
                                timeout_s=config.mesh.collective_timeout_s, device=str(device),
                                tensor_size=config.mesh.replicas("trainer").tensor_size)
    model = VisionLanguageModel(model_config, getattr(torch, config.model.dtype), device, layout=layout,
                                group=communicator.ranks.tensor if size > 1 else tensor_parallel_group())
    session = BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket, process=f"trainer-{rank}",
                                    role="trainer")
    reader = PromptReader(session, processor, model_config, device)
    actor = ActorSlabs(session, layout, topology, rank)
    return TrainerEngine(session, reader, model, actor, checkpoint, communicator,
                         logprob_chunk_tokens=section.logprob_chunk_tokens, offload_pool_bytes=section.offload_pool_bytes,
                         gradients=section.gradient_place(topology.device_kind), check_hashes=section.check_hashes,
                         prefix_stream=open_prefix_stream(config.mesh, rank))


def serve_forever(config: TrainerConfig, rank: int) -> None:
    """Blocks until SIGTERM."""
    name, size = f"trainer-{rank}", config.mesh.train_tensor_parallel
    if not 0 <= rank < size:
        raise BadInput(f"rank {rank} of {size}: [mesh] train_tensor_parallel says how many there are")
    configure_logging(name)
    init_tensor_parallel(0, 1)
    try:
        run(serve_engine(name, config.mesh.address(name), lambda: build_engine(config, rank), add_trainer,
                         drain_timeout_s=config.mesh.drain_timeout_s, config=config_facts(config.mesh, config.model),
                         warm_up=partial(warm_up, config.model.checkpoint, config.model.dtype,
                                         config.mesh.topology.device_name(rank), trains=True,
                                         ranks=config.mesh.replicas("trainer").tensor_size)))
    finally:
        destroy_tensor_parallel()
