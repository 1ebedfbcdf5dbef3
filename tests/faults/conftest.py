"""One mesh of real processes for all tests of faults from outside."""

from __future__ import annotations

import pytest
from faulty_mesh import FaultyMesh


@pytest.fixture(scope="session")
def mesh(tiny_checkpoint, tmp_path_factory):
    mesh = FaultyMesh(tiny_checkpoint, tmp_path_factory.mktemp("media"))
    try:
        mesh.up(timeout_s=5.0, retries=6)
        yield mesh
    finally:
        mesh.close()


@pytest.fixture
def client(mesh):
    with mesh.client as client:
        yield client
