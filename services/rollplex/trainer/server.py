"""Wires a trainer process: config -> broker session -> model -> engine -> server."""

from __future__ import annotations

import torch

from rollplex.data.processor import PromptProcessor
from rollplex.engine import ActorMapping, PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.memory.host_driver import HostDriver
from rollplex.model import VisionLanguageModel, destroy_tensor_parallel, init_tensor_parallel, read_model_config
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run
from rollplex.trainer.config import TrainerConfig
from rollplex.trainer.engine import TrainerEngine
from rollplex.trainer.servicer import add_trainer


def build_engine(config: TrainerConfig, rank: int) -> TrainerEngine:
    """Everything behind the servicer. Call it on the owner thread, in a tensor-parallel group: torch keeps its thread count
    by thread."""
    section, checkpoint, driver = config.trainer, config.model.checkpoint, HostDriver()
    torch.set_num_threads(section.threads)
    model_config = read_model_config(checkpoint)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    model = VisionLanguageModel(model_config, getattr(torch, config.model.dtype))
    session = BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket, process=f"trainer-{rank}",
                                    role="trainer", driver=driver)
    reader = PromptReader(session, driver, processor, model_config)
    actor = ActorMapping(session, driver, model.layout)
    return TrainerEngine(session, reader, model, actor, checkpoint, logprob_chunk_tokens=section.logprob_chunk_tokens,
                         offload_pool_bytes=section.offload_pool_bytes)


def serve_forever(config: TrainerConfig, rank: int) -> None:
    """Blocks until SIGTERM."""
    name = f"trainer-{rank}"
    configure_logging(name)
    init_tensor_parallel(rank, config.mesh.train_tensor_parallel, store=f"file://{config.mesh.rendezvous_dir}/trainer",
                         timeout_s=config.mesh.collective_timeout_s)
    try:
        run(serve_engine(name, config.mesh.address(name), lambda: build_engine(config, rank), add_trainer,
                         drain_timeout_s=config.mesh.drain_timeout_s))
    finally:
        destroy_tensor_parallel()
