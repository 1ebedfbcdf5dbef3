"""Wires a reference process: config -> broker session -> weights and model -> engine -> server."""

from __future__ import annotations

import torch

from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.memory.host_driver import HostDriver
from rollplex.model import VisionLanguageModel, init_tensor_parallel, read_model_config
from rollplex.reference.config import ReferenceConfig
from rollplex.reference.engine import ReferenceEngine
from rollplex.reference.servicer import add_reference
from rollplex.reference.weights import ReferenceWeights
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run

PROCESS = "reference-0"


def build_engine(config: ReferenceConfig) -> ReferenceEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count, and after
    init_tensor_parallel."""
    torch.set_num_threads(config.reference.threads)
    checkpoint, driver = config.model.checkpoint, HostDriver()
    model_config = read_model_config(checkpoint)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    model = VisionLanguageModel(model_config, getattr(torch, config.model.dtype))
    session = BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket, process=PROCESS,
                                    role="reference")
    weights = ReferenceWeights(session, driver, model_config, model.layout, checkpoint, rank=model.tp_rank)
    reader = PromptReader(session, driver, processor, model_config)
    return ReferenceEngine(session, reader, model, weights, suffix_tokens=config.reference.suffix_tokens)


def serve_forever(config: ReferenceConfig) -> None:
    """Blocks until SIGTERM."""
    configure_logging(PROCESS)

    def build() -> ReferenceEngine:
        init_tensor_parallel(0, 1)
        return build_engine(config)

    run(serve_engine(PROCESS, config.mesh.address(PROCESS), build, add_reference,
                     drain_timeout_s=config.mesh.drain_timeout_s))
