"""Which reference prefixes an iteration still needs, begun or gone on with."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from rollplex.coordinator.overlap import unreferenced
from rollplex.coordinator.records import SampleRecord


def sample(group: int, index: int, reward: float | None = None, *, scored: bool = True, reference: bool = False) -> SampleRecord:
    record = SampleRecord(group, index, array("q", [5]), array("f", [-1.0]), "stop", "")
    record.reward, record.scored = reward, scored
    record.reference_logprobs = array("f", [-1.0]) if reference else None
    return record


@pytest.mark.parametrize(("samples", "filtered", "expected"), [
    ([], True, [0, 1]),
    # One sample of the first group is not there yet.
    ([sample(0, 0, 1.0, reference=True)], True, [0, 1]),
    ([sample(0, 0, 1.0, reference=True), sample(0, 1, 0.0, reference=True)], True, [1]),
    # Without a signal: left out of training, if that is asked for and both rewards are in.
    ([sample(0, 0, 1.0), sample(0, 1, 1.0)], True, [1]), ([sample(0, 0, 1.0), sample(0, 1, 1.0)], False, [0, 1]),
    ([sample(0, 0, 1.0), sample(0, 1, None, scored=False)], True, [0, 1]),
    ([sample(0, 0, 1.0), sample(0, 1, 0.0)], True, [0, 1])])
def test_prefixes_of_what_is_not_scored_and_is_trained_on(samples, filtered, expected):
    prompts = [SimpleNamespace(group=SimpleNamespace(group_index=index, sample_count=2)) for index in range(2)]
    work = SimpleNamespace(prompts=prompts, config=SimpleNamespace(filter_zero_variance=filtered),
                           samples={(one.group_index, one.sample_index): one for one in samples})
    assert unreferenced(work) == expected
