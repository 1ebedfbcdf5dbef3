"""Wires a reference process: config -> broker session -> weights and model -> engine -> server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from rollplex.core.compatibility import config_facts
from rollplex.core.errors import BadInput
from rollplex.core.topology import is_cuda
from rollplex.data.processor import PromptProcessor
from rollplex.engine import Communicator, PromptReader, layout_facts, use_device
from rollplex.engine.hbm_share import bound_allocator
from rollplex.engine.prefix_stream import open_prefix_stream
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.model import (
    ActorLayout,
    Ranks,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    read_model_config,
    tensor_parallel_group,
)
from rollplex.model.warmup import warm_up
from rollplex.reference.config import ReferenceConfig
from rollplex.reference.engine import ReferenceEngine, Weights
from rollplex.reference.paging import PagedWeights
from rollplex.reference.servicer import add_reference
from rollplex.reference.weights import ReferenceWeights
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run


def build_engine(config: ReferenceConfig, rank: int = 0) -> ReferenceEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count, and after
    init_tensor_parallel(0, 1): ranks meet when they join an epoch."""
    section, checkpoint, mesh = config.reference, config.model.checkpoint, config.mesh
    torch.set_num_threads(section.threads)
    size, topology = mesh.reference_tensor_parallel, mesh.topology
    device = topology.device_name(rank)
    computes_on = use_device(device)
    bound_allocator(computes_on, budget_gib=mesh.hbm_budget_gib, share_gib=section.hbm_share_gib)
    model_config = read_model_config(checkpoint)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    communicator = Communicator("reference", rank, size, mesh.rendezvous_dir, timeout_s=mesh.collective_timeout_s,
                                device=str(computes_on), tensor_size=mesh.replicas("reference").tensor_size)
    model = VisionLanguageModel(model_config, getattr(torch, config.model.dtype), computes_on,
                                group=communicator.ranks.tensor if size > 1 else tensor_parallel_group())
    session = BrokerSession.connect(mesh.address("broker"), mesh.handle_socket, process=f"reference-{rank}",
                                    role="reference")
    weights = open_weights(section.weights, device, session, model, checkpoint, communicator.ranks)
    reader = PromptReader(session, processor, model_config, computes_on)
    actor = ActorLayout.build(model_config, topology.rollout_tp, config.model.dtype, topology.train_tp)
    return ReferenceEngine(session, reader, model, weights, communicator, layout_facts(model_config, actor),
                           device=device, residency=section.weights, suffix_tokens=section.suffix_tokens,
                           prefix_stream=open_prefix_stream(mesh, rank))


def open_weights(residency: str, device: str, session: BrokerSession, model: VisionLanguageModel, checkpoint: Path,
                 ranks: Ranks) -> Weights:
    """`resident`: a slab of the device's own. `paged`: a host slab, which the CPU reads where it lies."""
    home = device if residency == "resident" else "host"
    weights = ReferenceWeights(session, model.config, model.layout, checkpoint, ranks, device=home)
    return PagedWeights(weights, driver_of(device)) if is_cuda(device) and home == "host" else weights


def serve_forever(config: ReferenceConfig, rank: int) -> None:
    """Blocks until SIGTERM."""
    name, size = f"reference-{rank}", config.mesh.reference_tensor_parallel
    if not 0 <= rank < size:
        raise BadInput(f"rank {rank} of {size}: [mesh] reference_tensor_parallel says how many there are")
    configure_logging(name)
    init_tensor_parallel(0, 1)
    try:
        run(serve_engine(name, config.mesh.address(name), lambda: build_engine(config, rank), add_reference,
                         drain_timeout_s=config.mesh.drain_timeout_s, config=config_facts(config.mesh, config.model),
                         warm_up=partial(warm_up, config.model.checkpoint, config.model.dtype,
                                         config.mesh.topology.device_name(rank), trains=False,
                                         ranks=config.mesh.replicas("reference").tensor_size)))
    finally:
        destroy_tensor_parallel()
