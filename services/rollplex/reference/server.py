"""Wires a reference process: config -> broker session -> weights and model -> engine -> server."""

from __future__ import annotations

import torch

from rollplex.core.errors import BadInput
from rollplex.data.processor import PromptProcessor
from rollplex.engine import Communicator, PromptReader, layout_hash
from rollplex.engine.prefix_stream import open_prefix_stream
from rollplex.memory.client import BrokerSession
from rollplex.model import (
    ActorLayout,
    Seat,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    read_model_config,
    tensor_parallel_group,
)
from rollplex.reference.config import ReferenceConfig
from rollplex.reference.engine import ReferenceEngine
from rollplex.reference.servicer import add_reference
from rollplex.reference.weights import ReferenceWeights
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run


def build_engine(config: ReferenceConfig, rank: int = 0) -> ReferenceEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count, and after
    init_tensor_parallel(0, 1): ranks meet when they join an epoch."""
    torch.set_num_threads(config.reference.threads)
    checkpoint, mesh = config.model.checkpoint, config.mesh
    size, topology = mesh.reference_tensor_parallel, mesh.topology
    model_config = read_model_config(checkpoint)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    model = VisionLanguageModel(model_config, getattr(torch, config.model.dtype),
                                group=Seat(rank, size) if size > 1 else tensor_parallel_group())
    session = BrokerSession.connect(mesh.address("broker"), mesh.handle_socket, process=f"reference-{rank}",
                                    role="reference")
    weights = ReferenceWeights(session, model_config, model.layout, checkpoint, rank=rank)
    reader = PromptReader(session, processor, model_config)
    actor = ActorLayout.build(model_config, topology.rollout_tp, config.model.dtype, topology.train_tp)
    communicator = Communicator("reference", rank, size, mesh.rendezvous_dir, timeout_s=mesh.collective_timeout_s)
    return ReferenceEngine(session, reader, model, weights, communicator, layout_hash(model_config, actor),
                           suffix_tokens=config.reference.suffix_tokens, prefix_stream=open_prefix_stream(mesh, rank))


def serve_forever(config: ReferenceConfig, rank: int) -> None:
    """Blocks until SIGTERM."""
    name, size = f"reference-{rank}", config.mesh.reference_tensor_parallel
    if not 0 <= rank < size:
        raise BadInput(f"rank {rank} of {size}: [mesh] reference_tensor_parallel says how many there are")
    configure_logging(name)
    init_tensor_parallel(0, 1)
    try:
        run(serve_engine(name, config.mesh.address(name), lambda: build_engine(config, rank), add_reference,
                         drain_timeout_s=config.mesh.drain_timeout_s))
    finally:
        destroy_tensor_parallel()
