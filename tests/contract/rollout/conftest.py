"""The rollout contract's fixtures. A further engine joins by one entry in ENGINES."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_rig import Actor, Loop, broker, connect, served
from replica_rig import replica_process
from tiny_checkpoint import PromptMaker, frozen_model, save_tiny, tensor_parallel

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.topology import Topology
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.memory.host_driver import HostDriver
from rollplex.rollout.config import RolloutConfig, RolloutSection
from rollplex.rollout.server import build_engine
from rollplex.rollout.servicer import add_rollout

MAX_ROWS = 12


def torch_engine(model: ModelSection, mesh: MeshSection):
    """The engine of a process "rollout-0", on the mesh's broker."""
    config = RolloutConfig(model=model, mesh=mesh, rollout=RolloutSection(engine="torch", max_rows=MAX_ROWS))
    return build_engine(config, 0)


ENGINES = {"torch": torch_engine}
REPLICAS = {"torch-tp2": (Topology(2, 2), 0), "torch-tp2-q2": (Topology(4, 2), 1)}
"""Engines in processes of their own: degrees and the replica's number. With q = 2 o_proj and down_proj lie transposed."""


@pytest.fixture(scope="module", params=[*ENGINES, *REPLICAS])
def engine_name(request):
    return request.param


@pytest.fixture(scope="module")
def mesh(engine_name, tmp_path_factory):
    """A broker with the trainer's session on it, the actor at snapshot 0, and an oracle on the checkpoint's weights."""
    torch.set_num_threads(1)
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh", numbered=True))
    section.runtime_dir.chmod(0o700)
    loop = Loop()
    with tensor_parallel(), broker(section), connect(section, "trainer-0", "trainer") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
        topology, replica = REPLICAS.get(engine_name, (Topology(), 0))
        actor = Actor(session, checkpoint, topology=topology, replica=replica)
        oracle = frozen_model(checkpoint)
        yield SimpleNamespace(
            section=section, checkpoint=checkpoint, session=session, loop=loop, actor=actor, oracle=oracle,
            model=ModelSection(checkpoint=checkpoint), reader=PromptReader(session, HostDriver(), processor, oracle.config),
            prompts=PromptMaker(processor, actor.depositor()))
        actor.close()


@pytest.fixture(scope="module")
def rollout(engine_name, mesh):
    """The served engine, its run open."""
    if engine_name in REPLICAS:
        topology, replica = REPLICAS[engine_name]
        with replica_process(mesh, topology, replica) as (client, _):
            client.open_run()
            yield client
        return
    engine = ENGINES[engine_name](mesh.model, mesh.section)
    with served(mesh.loop, mesh.section, "rollout-0", engine, add_rollout) as client:
        client.engine = engine
        client.open_run()
        yield client


@pytest.fixture
def bound(mesh, rollout):
    """Bound to the newest snapshot."""
    rollout.bind(mesh.actor.snapshot)
    yield rollout
    rollout.quiesce()
