"""Wires a rollout process: config -> broker session -> token engine -> engine -> server."""

from __future__ import annotations

import importlib.util

import torch

from rollplex.core.errors import BadInput
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.memory.host_driver import HostDriver
from rollplex.model import ModelConfig, init_tensor_parallel, read_model_config
from rollplex.rollout.config import RolloutConfig
from rollplex.rollout.engine import RolloutEngine, TokenEngine
from rollplex.rollout.servicer import add_rollout
from rollplex.rollout.torch_engine import TorchEngine
from rollplex.rpc.engine_server import serve_engine
from rollplex.rpc.server import configure_logging, run


def build_engine(config: RolloutConfig, process: str) -> RolloutEngine:
    """Everything behind the servicer. Call it on the owner thread, where torch keeps its thread count, and after
    init_tensor_parallel."""
    torch.set_num_threads(config.rollout.threads)
    model, driver = read_model_config(config.model.checkpoint), HostDriver()
    processor = PromptProcessor.load(config.model.checkpoint, max_prompt_tokens=config.model.max_prompt_tokens)
    session = BrokerSession.connect(config.mesh.address("broker"), config.mesh.handle_socket, process=process,
                                    role="rollout")
    reader = PromptReader(session, driver, processor, model)
    try:
        if config.rollout.engine == "vllm":
            return RolloutEngine(_vllm(session, reader, processor, model, config))
        return RolloutEngine(TorchEngine(session, driver, reader, model, config.model.dtype,
                                         max_rows=config.rollout.max_rows))
    except BaseException:
        session.close()
        raise


def _vllm(session: BrokerSession, reader: PromptReader, processor: PromptProcessor, model: ModelConfig,
          config: RolloutConfig) -> TokenEngine:
    """Imports vLLM, in the environment that it needs."""
    if importlib.util.find_spec("vllm") is None:
        raise BadInput("rollout.engine is vllm, which is not installed here; docs/vllm.md says how", reason="NO_VLLM")
    from rollplex.rollout.vllm_internals import set_environment

    set_environment()
    from rollplex.rollout.vllm_engine import VllmEngine

    return VllmEngine(session, reader, processor, model, config)


def serve_forever(config: RolloutConfig, replica: int) -> None:
    """Blocks until SIGTERM."""
    name = f"rollout-{replica}"
    configure_logging(name)

    def build() -> RolloutEngine:
        if config.rollout.engine == "torch":
            init_tensor_parallel(0, 1)
        return build_engine(config, name)

    run(serve_engine(name, config.mesh.address(name), build, add_rollout, drain_timeout_s=config.mesh.drain_timeout_s))
