"""Descriptors, mappings, threads, leases, slabs and sessions: as many after iterations and kills as before. `python -m
tests.faults.leak_hunt` does more of them."""

from __future__ import annotations

import pytest
from leak_hunt import hunt

pytestmark = pytest.mark.slow


def test_nothing_leaks_over_iterations_and_kills(mesh):
    found = hunt(mesh, iterations=8, kills=4, seed=5)
    assert found.leaks == []
    assert found.states == {"done": 8}, found
    assert sum(found.kills.values()) == 4
    assert sum(found.compared.values()) >= 4
