"""A broker, and trainers over their socket: inside this process, or as `python -m rollplex.trainer`."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from engine_rig import Loop, broker, connect
from tiny_checkpoint import PromptMaker, save_tiny, tensor_parallel
from trainer_rig import TrainerClient

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.strict import to_plain, to_toml
from rollplex.data.processor import PromptProcessor
from rollplex.rpc.engine_server import start_engine
from rollplex.trainer.config import TrainerConfig, TrainerSection
from rollplex.trainer.server import build_engine
from rollplex.trainer.servicer import add_trainer

NAME = "trainer-0"
RUNS = (f"run-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    torch.set_num_threads(1)
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"))
    section.runtime_dir.chmod(0o700)
    trainer = TrainerSection(logprob_chunk_tokens=8, offload_pool_bytes=8 << 20)
    configuration = TrainerConfig(model=ModelSection(checkpoint=checkpoint), mesh=section, trainer=trainer)
    with tensor_parallel(), broker(section), connect(section, "coordinator", "coordinator") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)

        def deposit(name: str, fd: int, size_bytes: int) -> object:
            return session.deposit(name, fd, object_class="media", run="contract")

        yield SimpleNamespace(section=section, checkpoint=checkpoint, session=session, loop=Loop(), config=configuration,
                              prompts=PromptMaker(processor, deposit))


@pytest.fixture
def run() -> str:
    """A name of its own."""
    return next(RUNS)


@pytest.fixture
def serve(mesh, run):
    """serve() as (client, engine): a new trainer inside this process until the end of the context."""
    @contextmanager
    def served():
        engine = build_engine(mesh.config, 0)
        address = mesh.section.address(NAME)
        running = mesh.loop.run(start_engine(NAME, address, engine, add_trainer))
        client = TrainerClient(address, mesh.session, run)
        try:
            yield client, engine
        finally:
            client.channel.close()
            mesh.loop.run(running.drain(2))
            engine.close()

    return served


@pytest.fixture
def spawn(mesh, run, tmp_path):
    """spawn("key=value", ...) as (client, process): a trainer process; ended with SIGTERM unless it has ended before."""
    @contextmanager
    def spawned(*overrides: str):
        file = tmp_path / "mesh.toml"
        file.write_text(to_toml(to_plain(mesh.config) | {"rollout": {"threads": 1}}))
        command = [sys.executable, "-m", "rollplex.trainer", "--config", str(file), "--set", "trainer.threads=1"]
        command += [part for override in overrides for part in ("--set", override)]
        process = subprocess.Popen(command)
        try:
            client = TrainerClient(mesh.section.address(NAME), mesh.session, run)
            yield client, process
            client.channel.close()
        finally:
            process.terminate()
            process.wait(20)

    return spawned


@pytest.fixture
def groups(mesh):
    return [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "image", "video", "mixed"])]
