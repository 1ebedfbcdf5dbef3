"""Descriptors, mappings, threads, leases, slabs and sessions: as many after iterations and kills as before. `python -m
tests.faults.leak_hunt` does more of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_nothing_leaks_over_iterations_and_kills(mesh):
    # Not a package: pytest imports tests by their paths.
    spec = importlib.util.spec_from_file_location("leak_hunt", Path(__file__).with_name("leak_hunt.py"))
    leak_hunt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(leak_hunt)
    found = leak_hunt.hunt(mesh, iterations=8, kills=4, seed=5)
    assert found.leaks == []
    assert found.states == {"done": 8}, found
    assert sum(found.kills.values()) == 4
    assert sum(found.compared.values()) >= 4
