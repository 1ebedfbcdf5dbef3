"""The rollout contract's fixtures. A further engine joins by one entry in ENGINES."""

from __future__ import annotations

import pytest
from engine_rig import served
from gpu_marks import NEEDS_GPU, NEEDS_TWO_GPUS
from replica_rig import VLLM, WORKER, replica_process
from rollout_rig import actor_mesh
from tiny_checkpoint import save_tiny

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.topology import Topology
from rollplex.rollout.config import RolloutConfig, RolloutSection, VllmSection
from rollplex.rollout.server import build_engine
from rollplex.rollout.servicer import add_rollout

MAX_ROWS = 12


def torch_engine(model: ModelSection, mesh: MeshSection):
    """The engine of a process "rollout-0", on the mesh's broker."""
    config = RolloutConfig(model=model, mesh=mesh, rollout=RolloutSection(engine="torch", max_rows=MAX_ROWS))
    return build_engine(config, 0)


def vllm_engine(model: ModelSection, mesh: MeshSection):
    """The same on vLLM, in this process too."""
    rollout = RolloutSection(engine="vllm", max_rows=MAX_ROWS, vllm=VllmSection(kv_cache_gib=0.0625, max_model_len=2048))
    return build_engine(RolloutConfig(model=model, mesh=mesh, rollout=rollout), 0)


ENGINES = {"torch": torch_engine, "vllm": vllm_engine}
REPLICAS = {"torch-tp2": (Topology(2, 2), 0), "torch-tp2-q2": (Topology(4, 2), 1), "torch-q2": (Topology(2, 1), 1),
            "vllm-tp2-q2": (Topology(4, 2), 1), "vllm-worker": (Topology(), 0),
            "vllm-cuda-worker": (Topology(device_kind="cuda"), 0), "torch-cuda": (Topology(device_kind="cuda"), 0),
            "vllm-cuda": (Topology(device_kind="cuda"), 0), "torch-cuda-tp2": (Topology(2, 2, device_kind="cuda"), 0),
            "vllm-cuda-tp2": (Topology(2, 2, device_kind="cuda"), 0), "torch-cuda-q2": (Topology(2, 1, device_kind="cuda"), 1),
            "vllm-cuda-q2": (Topology(2, 1, device_kind="cuda"), 1)}
"""Engines in processes of their own: degrees and the replica's number. With q = 2 o_proj and down_proj lie transposed."""


@pytest.fixture(scope="module", params=[
    *ENGINES,
    *(pytest.param(name, marks=pytest.mark.ranks) for name in ("torch-tp2", "torch-tp2-q2", "vllm-tp2-q2", "vllm-worker")),
    *(pytest.param(name, marks=NEEDS_GPU) for name in ("torch-cuda", "vllm-cuda", "vllm-cuda-worker")),
    *(pytest.param(name, marks=NEEDS_TWO_GPUS) for name in REPLICAS if name.endswith(("-cuda-tp2", "-cuda-q2")))])
def engine_name(request):
    if request.param.startswith("vllm"):
        pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")
    return request.param


@pytest.fixture(scope="module")
def dtype():
    """Of the actor; a module may have another."""
    return "float32"


@pytest.fixture(scope="module")
def tolerance(engine_name):
    """Of log-probabilities in float32, against the trainer's on a CPU. vLLM's attention for it on a GPU multiplies in TF32."""
    return next((bound for name, bound in (("torch-cuda", 1e-3), ("vllm-cuda", 2e-2)) if engine_name.startswith(name)), 1e-4)


@pytest.fixture(scope="module")
def mesh(engine_name, dtype, tmp_path_factory):
    topology, replica = REPLICAS.get(engine_name, (Topology(), 0))
    folders = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("mesh", numbered=True)
    with actor_mesh(save_tiny(folders[0]), folders[1], topology, replica, dtype=dtype) as made:
        yield made


@pytest.fixture(scope="module")
def rollout(engine_name, mesh):
    """The served engine, its run open."""
    if engine_name in REPLICAS:
        topology, replica = REPLICAS[engine_name]
        options = (*(VLLM if engine_name.startswith("vllm") else ()), *(WORKER if "worker" in engine_name else ()))
        with replica_process(mesh, topology, replica, *options) as (client, _):
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
