"""The rollout contract's fixtures. A further engine joins by one entry in ENGINES."""

from __future__ import annotations

import pytest
from engine_rig import served
from rollout_rig import actor_mesh
from tiny_checkpoint import save_tiny

from rollplex.core.config import MeshSection, ModelSection
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
    with actor_mesh(save_tiny(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("mesh", numbered=True)) as made:
        yield made


@pytest.fixture(scope="module", params=list(ENGINES))
def engine_name(request):
    return request.param


@pytest.fixture(scope="module")
def rollout(engine_name, mesh):
    """The served engine, its run open."""
    engine = ENGINES[engine_name](mesh.model, mesh.section)
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
