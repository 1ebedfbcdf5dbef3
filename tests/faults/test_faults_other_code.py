"""Services restarted with other protos, another configuration or another layout: refused, with what differs, until they fit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from faulty_mesh import PROMPTS
from stub_mesh import stub_mesh, text_rows

from rollplex.core.errors import WrongState

ROOT = Path(__file__).parents[2]


def restarted(mesh, name, **options):
    mesh.stop(name)
    mesh.start(name, **options)


def refused(client, run, reason):
    with pytest.raises(WrongState) as error:
        client.wait(client.submit_iteration(run, PROMPTS[:2]))
    assert error.value.reason == reason, error.value
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option", "words"), [
    ("broker", "mesh.hbm_budget_gib=7", "broker (pid {pid}) does not fit coordinator: mesh.hbm_budget_gib: 0.0 in coordinator, "
                                        "7.0 in broker"),
    ("coordinator", "model.dtype=float64", "does not fit coordinator: model.dtype: float64 in coordinator, float32 in "),
], ids=["mesh", "model"])
def test_another_configuration(mesh, client, name, option, words):
    run = mesh.new_run(client)
    restarted(mesh, name, arguments=("--set", option))
    try:
        assert words.format(pid=mesh.pid("broker")) in refused(client, run, "CONFIG_MISMATCH")
    finally:
        restarted(mesh, name)
    assert client.wait(client.submit_iteration(run, PROMPTS[:2])).state == "done"


@pytest.fixture(scope="module")
def other_protos(tmp_path_factory):
    """A folder of generated code in which one field has another type and one is new."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    from grpc_tools import protoc

    folder = tmp_path_factory.mktemp("protos")
    sources, made = folder / "sources" / "rollplex" / "v1", folder / "gen"
    sources.mkdir(parents=True)
    made.mkdir()
    for path in (ROOT / "protos" / "rollplex" / "v1").glob("*.proto"):
        text = path.read_text()
        if path.stem == "phase_service":
            text = text.replace("int32 rank = 3;", "int64 rank = 3;").replace(
                "message JoinResponse {", "message JoinResponse {\n  // New.\n  string colour = 99;")
        (sources / path.name).write_text(text)
    arguments = ["protoc", f"-I{folder / 'sources'}", f"-I{Path(protoc.__file__).parent / '_proto'}", f"--python_out={made}",
                 f"--grpc_python_out={made}", *map(str, sources.glob("*.proto"))]
    assert protoc.main(arguments) == 0
    return made


@pytest.mark.slow
def test_other_protos(mesh, client, other_protos):
    run = mesh.new_run(client)
    known = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if Path(entry) != ROOT / "protos" / "gen"] \
        if "PYTHONPATH" in os.environ else sys.path
    restarted(mesh, "broker", environment={"PYTHONPATH": os.pathsep.join([str(other_protos), *known])})
    try:
        message = refused(client, run, "PROTO_MISMATCH")
        assert "rollplex.v1.JoinResponse.colour: absent in coordinator, string = 99 in broker" in message
        assert "rollplex.v1.JoinResponse.rank: int32 = 3 in coordinator, int64 = 3 in broker" in message
    finally:
        restarted(mesh, "broker")
    assert client.wait(client.submit_iteration(run, PROMPTS[:2])).state == "done"


OTHER = {"slab.dtype": "float32", "lm_head.weight": "offset 512, [203, 64] float32"}


@pytest.fixture
async def stubs(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, train_tensor_parallel=2, rollout_tensor_parallel=2) as mesh:
        await mesh.coordinator.create_run("run", json.dumps({"sampling": {"samples_per_group": 2}}))
        yield mesh


async def replaced(mesh, name, facts):
    await mesh.kill(name)
    engine = await mesh.replace(name, layout_facts=facts)
    assert engine.layout_facts == facts


async def iterate(mesh):
    iteration, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    return await mesh.finished(iteration.key)


@pytest.mark.parametrize(("name", "held"), [("trainer-1", "trainer-0"), ("rollout-0", "trainer-0")])
async def test_another_layout_in_one_engine(stubs, name, held):
    await replaced(stubs, name, OTHER)
    failed = await iterate(stubs)
    assert failed.error.reason == "LAYOUT_MISMATCH"
    assert f"lm_head.weight: absent in {held}, offset 512, [203, 64] float32 in {name}" in failed.error.message
    await replaced(stubs, name, {"slab.dtype": "float32"})
    assert (await iterate(stubs)).error is None


async def test_another_layout_in_all_engines_does_not_fit_the_open_runs_slabs(stubs):
    for name in ("trainer-0", "trainer-1", "rollout-0", "reference-0"):
        await replaced(stubs, name, OTHER)
    failed = await iterate(stubs)
    assert failed.error.reason == "LAYOUT_MISMATCH"
    assert "does not fit the open run 'run': lm_head.weight: absent in the open run 'run'" in failed.error.message
    await stubs.coordinator.create_run("another", "{}")
    iteration, _ = await stubs.coordinator.submit("another", text_rows(1), "", validation=False)
    assert (await stubs.finished(iteration.key)).error is None
