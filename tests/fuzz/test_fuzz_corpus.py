"""The fuzz targets on their seeds and on seeded changes of them: what `make fuzz` does longer, with coverage to guide it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seeds import mutated, seeds
from targets import TARGETS, run_one

MUTATIONS = {"handle_frames": 4000, "keeper_frames": 2000, "tickets": 4000,
             "run_config": 2000, "prompt_rows": 4000, "media_headers": 200}


def test_every_target_has_seeds():
    assert TARGETS.keys() == MUTATIONS.keys()
    assert all(seeds(name) for name in TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_inputs_do_no_harm(name):
    rng, inputs = random.Random(11), seeds(name)
    TARGETS[name](b"")  # what is made once
    for data in inputs:
        run_one(TARGETS[name], data)
    for number in range(MUTATIONS[name]):
        data = mutated(rng.choice(inputs), rng)
        try:
            run_one(TARGETS[name], data)
        except Exception as error:
            raise AssertionError(f"{name}, change {number}: {data!r}") from error
