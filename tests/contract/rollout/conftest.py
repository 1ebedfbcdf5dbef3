"""The rollout contract's fixtures. A further engine joins by one entry in ENGINES."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_rig import Actor, Loop, broker, connect, served
from tiny_checkpoint import PromptMaker, frozen_model, save_tiny, tensor_parallel

from rollplex.core.config import MeshSection, ModelSection
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.memory.host_driver import HostDriver
from rollplex.rollout.config import RolloutConfig, RolloutSection, VllmSection
from rollplex.rollout.server import build_engine
from rollplex.rollout.servicer import add_rollout

MAX_ROWS = 12


def torch_engine(model: ModelSection, mesh: MeshSection):
    """The engine of a process "rollout-0", on the mesh's broker."""
    config = RolloutConfig(model=model, mesh=mesh, rollout=RolloutSection(engine="torch", max_rows=MAX_ROWS))
    return build_engine(config, "rollout-0")


def vllm_engine(model: ModelSection, mesh: MeshSection):
    """The same on vLLM, in this process too."""
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")
    rollout = RolloutSection(engine="vllm", max_rows=MAX_ROWS, vllm=VllmSection(kv_cache_gib=0.0625, max_model_len=2048))
    return build_engine(RolloutConfig(model=model, mesh=mesh, rollout=rollout), "rollout-0")


ENGINES = {"torch": torch_engine, "vllm": vllm_engine}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A broker with the trainer's session on it, the actor at snapshot 0, and an oracle on the checkpoint's weights."""
    torch.set_num_threads(1)
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh", numbered=True))
    section.runtime_dir.chmod(0o700)
    loop = Loop()
    with tensor_parallel(), broker(section), connect(section, "trainer-0", "trainer") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
        actor = Actor(session, checkpoint)
        oracle = frozen_model(checkpoint)
        yield SimpleNamespace(
            section=section, checkpoint=checkpoint, session=session, loop=loop, actor=actor, oracle=oracle,
            model=ModelSection(checkpoint=checkpoint), reader=PromptReader(session, HostDriver(), processor, oracle.config),
            prompts=PromptMaker(processor, actor.depositor()))
        actor.mapping.close()


@pytest.fixture(scope="module", params=list(ENGINES))
def rollout(request, mesh):
    """The served engine, its run open."""
    engine = ENGINES[request.param](mesh.model, mesh.section)
    with served(mesh.loop, mesh.section, "rollout-0", engine, add_rollout) as client:
        client.engine = engine
        client.open_run(mesh.actor.slab)
        yield client


@pytest.fixture
def bound(mesh, rollout):
    """Bound to the newest snapshot."""
    rollout.bind(mesh.actor.snapshot)
    yield rollout
    rollout.quiesce()
