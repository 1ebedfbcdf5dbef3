"""A seeded sample of `rollplex chaos`: a real mesh, killed and stopped in the middle of things, learns what an unfaulted one
learns."""

from __future__ import annotations

import pytest

from rollplex_client.chaos.cells import Cell, choose
from rollplex_client.chaos.drill import Drill, Outcome
from rollplex_client.chaos.rig import rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20
CELLS = [
    *choose(actions=("kill",), count=7, seed=SEED),
    Cell("trainer.update.chunk_written", "trainer-0", "kill", nth=5),
    Cell("coordinator.update.begun", "coordinator", "kill"),
    Cell("rollout.decode.step", "rollout-0", "stop"),
    Cell("broker.publish.checked", "broker", "stop"),
    Cell("trainer.prefix.group", "trainer-0", "kill", then="trainer.attach.done"),
]


@pytest.fixture(scope="module")
def drill():
    with rig() as made:
        drill = Drill(made)
        drill.reference(len(CELLS))
        assert len({ended.weights for ended in drill.expected}) == len(CELLS)
        yield drill


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_survived(drill, cell):
    verdict = drill.run(cell)
    assert verdict.outcome is Outcome.SURVIVED, f"{verdict.reason}\n{drill.rig.log_ends(30)}"
