from __future__ import annotations

import itertools

import pytest

from rollplex.core.phases import Phase
from rollplex.core.residency import CONTRACT, Holding, Residency, check

O, S, U, IDLE = Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE, Phase.IDLE
HOT = {"actor_snapshot": {O, S, U, IDLE}, "rollout_kv": {O}, "boundary_trainer": {O, S}, "boundary_reference": {O, S},
       "reference_weights": {O, S}, "prefix_activations": {O, S}, "suffix_activations": {S}, "gradients": {S, U},
       "optimizer_state": {U}, "media": set(), "pinned_pool": set()}
"""memory.md section 3, written down again: the classes that may be in HBM, by phase."""


@pytest.mark.parametrize(("object_class", "phase"), list(itertools.product(HOT, Phase)))
def test_hot_phases(object_class, phase):
    role = min(CONTRACT[object_class].roles)
    wrong = check(phase, [Holding(object_class, role, "cuda:0", Residency.HBM, 1)])
    assert bool(wrong) == (phase not in HOT[object_class])


@pytest.mark.parametrize("object_class", sorted(CONTRACT))
def test_every_row_of_the_contract_is_covered(object_class):
    assert object_class in HOT
    assert check(Phase.IDLE, [Holding(object_class, "nobody", "host", Residency.HBM, 0)]) == []


def test_sentences_name_what_is_wrong():
    assert check(U, [Holding("rollout_kv", "rollout", "cuda:1", Residency.HBM, 42)]) == [
        "rollout_kv: 42 bytes hbm on cuda:1 in phase update"]
    assert check(O, [Holding("rollout_kv", "trainer", "cuda:1", Residency.HBM, 42)]) == ["trainer may not hold rollout_kv"]
    assert check(O, [Holding("weights", "trainer", "host", Residency.HBM, 1)]) == [
        "object class 'weights' is not in the contract"]
