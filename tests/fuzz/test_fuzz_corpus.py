"""The fuzz targets on their seeds and on seeded changes of them: what `make fuzz` does longer, with coverage to guide it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from corpus import MUTATIONS
from seeds import seeds
from targets import TARGETS


def test_every_target_has_seeds():
    assert TARGETS.keys() == MUTATIONS.keys()
    assert all(seeds(name) for name in TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_inputs_do_no_harm(name):
    command = [sys.executable, Path(__file__).with_name("corpus.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) == len(seeds(name)) + MUTATIONS[name]
