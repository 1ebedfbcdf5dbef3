from __future__ import annotations

import pytest

from rollplex.core.residency import Residency
from rollplex.core.work import ResidencyEntry
from rollplex.memory.arena import Arena


@pytest.fixture
def arena():
    return Arena("trainer", "host")


def test_holds_add_up_and_release_is_idempotent(arena):
    first = arena.hold("boundary_trainer", Residency.HBM, 10)
    with arena.hold("boundary_trainer", Residency.HBM, 5):
        assert arena.held_bytes("boundary_trainer") == 15
    first.release()
    first.release()
    assert arena.held_bytes("boundary_trainer") == 0


def test_peaks_are_since_the_last_call(arena):
    hold = arena.hold("gradients", Residency.HBM, 100)
    arena.hold("gradients", Residency.HBM, 50).release()
    assert arena.entries() == (ResidencyEntry("gradients", "trainer", "host", "hbm", 100, 150),)
    assert arena.entries() == (ResidencyEntry("gradients", "trainer", "host", "hbm", 100, 100),)
    hold.release()
    assert arena.entries() == (ResidencyEntry("gradients", "trainer", "host", "hbm", 0, 100),)
    assert arena.entries() == ()


def test_a_class_is_released_at_once(arena):
    holds = [arena.hold("suffix_activations", Residency.HBM, size) for size in (1, 2, 3)]
    arena.hold("gradients", Residency.HBM, 7)
    assert arena.release_class("suffix_activations") == 6
    assert arena.release_class("suffix_activations") == 0
    holds[0].release()
    assert arena.held_bytes("gradients") == 7


def test_negative_bytes_are_refused(arena):
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.hold("gradients", Residency.HBM, -1)
