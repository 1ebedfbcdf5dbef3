"""The reference's weights across restarts: each test starts engines of its own, one after the other."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
from noted_stream import NotedStream
from reference_rig import expected, materialize, respond, score
from safetensors.torch import load_file, save_file

from rollplex.core.config import ModelSection
from rollplex.core.errors import BadInput, WrongState
from rollplex.reference import weights

SLAB = "reference/weights/host"


@pytest.fixture
def loads(monkeypatch):
    """Checkpoints read so far."""
    paths = []
    real = weights.load_into

    def counting(checkpoint, *rest):
        paths.append(checkpoint)
        real(checkpoint, *rest)

    monkeypatch.setattr(weights, "load_into", counting)
    return paths


@pytest.fixture(autouse=True)
def _fresh(mesh):
    yield
    if mesh.session.list_slabs(SLAB):
        mesh.session.delete(SLAB)


def test_nothing_runs_before_open_run(serve_reference):
    with serve_reference() as client:
        with pytest.raises(WrongState) as caught:
            client.bind(0)
        assert caught.value.reason == "NO_RUN"


def test_a_restarted_process_finds_its_weights(mesh, serve_reference, loads):
    inodes = []
    for _ in range(2):
        with serve_reference() as client:
            client.open_run()
            client.open_run()
            inodes.append(client.bind(0).inodes["host"])
    assert len(loads) == 1
    assert inodes[0] == inodes[1] == mesh.session.list_slabs(SLAB)[0].inode


def test_a_half_loaded_slab_is_loaded_again(mesh, serve_reference, monkeypatch, loads):
    with serve_reference() as client:
        with monkeypatch.context() as patch:
            patch.setattr(weights, "load_into", lambda *arguments: (_ for _ in ()).throw(BadInput("cut short")))
            with pytest.raises(BadInput):
                client.open_run()
        assert loads == []
        client.open_run()
    assert len(loads) == 1


def test_other_weights_are_not_taken_for_ours(mesh, serve_reference, loads, tmp_path):
    with serve_reference() as client:
        client.open_run()
    other = tmp_path / "other"
    shutil.copytree(mesh.checkpoint, other)
    save_file(load_file(other / "model.safetensors"), other / "model.safetensors")
    changed = dataclasses.replace(mesh.config, model=ModelSection(checkpoint=other))
    with serve_reference(changed) as client:
        client.open_run()
    double = dataclasses.replace(mesh.config, model=ModelSection(checkpoint=other, dtype="float64"))
    with serve_reference(double) as client:
        client.open_run()
        assert client.bind(0).bound_parameters > 0
    assert loads == [mesh.checkpoint, other, other]


def test_prefix_blocks_run_on_the_stream_that_the_policy_gives(mesh, serve_reference, monkeypatch):
    group = mesh.prompts.group("text", 0)
    stream = NotedStream()
    monkeypatch.setattr("rollplex.reference.server.open_prefix_stream", lambda section, ordinal: stream)
    with serve_reference() as reference:
        reference.open_run()
        materialize(reference, [group])
        blocks = stream.entered
        assert blocks == mesh.oracle.config.layer_count
        assert not stream.open, "what follows has every SM"
        scored = score(reference, [respond(group)])
        for values, sample in zip(expected(mesh, group, respond(group)), scored.samples, strict=True):
            np.testing.assert_allclose(np.array(sample.logprobs), values, atol=1e-4)
        assert stream.entered == blocks
