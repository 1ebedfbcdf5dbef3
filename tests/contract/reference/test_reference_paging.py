"""Where the reference's weights are: paged around compute, as on a GPU (here with the host driver), or resident on the device."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest
from reference_rig import expected, materialize, respond, score

import rollplex.reference.server as wiring
from rollplex.core.errors import OutOfMemory, WrongState
from rollplex.memory.device_pages import DevicePages
from rollplex.memory.host_driver import HostDriver
from rollplex.reference.config import ReferenceSection
from rollplex.reference.paging import PagedWeights
from rollplex.reference.weights import ReferenceWeights
from rollplex.v1 import phase_service_pb2, phase_service_pb2_grpc


@pytest.fixture
def paged(monkeypatch):
    """What a GPU's reference does, on the host driver: its pages, its pinned slab, its copies. The last one that was made."""
    made = []

    def keep(*arguments):
        made.append(PagedWeights(*arguments))
        return made[-1]

    monkeypatch.setattr(wiring, "is_cuda", lambda device: True)
    monkeypatch.setattr(wiring, "PagedWeights", keep)
    return made


@pytest.fixture
def groups(mesh):
    return [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "video"])]


def weight_rows(mesh, what):
    ledger = mesh.session.ledger()
    rows = {"now": ledger.rows, "peak": ledger.peaks}[what]
    return {(row.device, row.residency): row.size_bytes for row in rows if row.object_class == "reference_weights"}


def said(client):
    joined = phase_service_pb2_grpc.PhaseServiceStub(client.channel).Join(phase_service_pb2.JoinRequest(), timeout=10)
    return dict(joined.residency)


def check_scores(mesh, client, groups):
    materialize(client, groups)
    scored = iter(score(client, [respond(group) for group in groups]).samples)
    for group in groups:
        for values in expected(mesh, group, respond(group)):
            np.testing.assert_allclose(np.array(next(scored).logprobs), values, atol=1e-4)


def test_paged_weights_score_the_same_and_leave_the_device(mesh, serve_reference, paged, groups):
    with serve_reference() as client:
        assert said(client) == {"reference_weights": "paged"}
        client.open_run()
        check_scores(mesh, client, groups)
        (weights,) = paged
        assert not weights._pages.backed
        size = weights.visiting_bytes
        assert weight_rows(mesh, "now") == {("host", "pinned"): weights.size_bytes}
        assert weight_rows(mesh, "peak") == {("host", "pinned"): weights.size_bytes, ("host:0", "hbm"): size}
        with weights.mapped():
            assert weights._pages.backed and all(view.isfinite().all() for view in weights.views().values())
        assert not weights._pages.backed
    with serve_reference() as client:
        client.open_run()
        assert not paged[-1].was_loaded, "the slab of the process before"
        check_scores(mesh, client, groups)


def test_a_lost_lease_is_taken_again(mesh, serve_reference, paged, groups):
    with serve_reference() as client:
        client.open_run()
        paged[0]._source._lease.lost = True
        assert not paged[0]._source.held
        check_scores(mesh, client, groups)
        assert paged[0]._source.held


def test_a_full_device_is_said_in_words(mesh, serve_reference, paged, groups, monkeypatch):
    def full(self):
        raise OSError(errno.ENOMEM, "no room")

    with serve_reference() as client:
        client.open_run()
        monkeypatch.setattr(DevicePages, "back", full)
        with pytest.raises(OutOfMemory, match=r"host:0 has no memory left in OVERLAP \(materialize_prefix\)"):
            materialize(client, groups)


def test_before_open_nothing_is_mapped(mesh):
    source = ReferenceWeights(mesh.session, mesh.oracle.config, mesh.oracle.layout, mesh.checkpoint)
    weights = PagedWeights(source, HostDriver())
    with pytest.raises(WrongState, match="open a run first"), weights.mapped():
        raise AssertionError("unreachable")
    weights.close()


def test_resident_weights_are_a_slab_of_the_device(mesh, serve_reference, groups):
    config = replace(mesh.config, reference=ReferenceSection(suffix_tokens=24, weights="resident"))
    with serve_reference(config) as client:
        client.open_run()
        (slab,) = mesh.session.list_slabs("reference/weights/host:0")
        assert client.bind(0).inodes == {"host:0": slab.inode}
        assert said(client) == {"reference_weights": "resident"}
        assert weight_rows(mesh, "now")["host:0", "hbm"] == slab.size_bytes
        check_scores(mesh, client, groups)
    mesh.session.delete(slab.name)
