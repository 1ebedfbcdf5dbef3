"""A device's budget through the coordinator: what a run needs is told to the broker, and refused before it is done."""

from __future__ import annotations

import json

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.planner import Planner
from rollplex.coordinator.records import IterationState
from rollplex.core.config import MeshSection, RunConfig
from rollplex.core.hbm_shares import EngineChoices
from rollplex.core.phases import Phase
from rollplex.core.shapes import read_shapes
from rollplex.core.strict import parse
from rollplex.data.processor import PromptProcessor

GIB = 1 << 30
OPTIONS = {"loss": {"kl_coef": 0.1}, "optimizer": {"chunk_elements": 1000}, "sampling": {"max_response_tokens": 3}}


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    """A budget that the run keeps, to the byte."""
    section = MeshSection(runtime_dir=tmp_path, hbm_budget_gib=1.0)
    planner = Planner(section, read_shapes(tiny_checkpoint), "float32")
    processor = PromptProcessor.load(tiny_checkpoint, max_prompt_tokens=2048)
    lengths = [len(processor.tokenize(row.messages).token_ids) for row in text_rows(3)]
    needs = planner.needs(parse(RunConfig, OPTIONS), lengths, EngineChoices(), generates=True, trains=True,
                          media=[()] * len(lengths))
    peak = max(sum(item.size_bytes for item in needs.planned(phase)) for phase in Phase)
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, hbm_budget_gib=peak / GIB) as mesh:
        yield mesh


async def iterate(mesh, name, **options):
    await mesh.coordinator.create_run(name, json.dumps(OPTIONS | options))
    iteration, _ = await mesh.coordinator.submit(name, text_rows(3), "", validation=False)
    return await mesh.finished(iteration.key)


async def test_a_run_within_the_budget_goes_through(mesh):
    done = await iterate(mesh, "full")
    assert done.state is IterationState.DONE
    assert not [name for name in done.metrics if name.startswith("memory/unexplained_bytes")], "no GPU, no driver's figure"


@pytest.mark.parametrize("name", ["no_state_offload", "rollout_resident", "unchunked_optimizer"])
async def test_an_ablated_one_is_refused_with_the_table_and_publishes_nothing(mesh, name):
    failed = await iterate(mesh, "ablated", ablation={name: True})
    assert (failed.state, failed.error.reason) == (IterationState.FAILED, "PHASE_OVER_BUDGET")
    assert "object class" in failed.error.message and "host:0" in failed.error.message
    assert mesh.coordinator.runs.get("ablated").snapshot == 0 and "apply_update" not in mesh.trainer.calls[-1:]
