"""What the coordinator tells the broker of an iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollplex.coordinator.planner import IterationNeeds, Planner, engine_choices, longest_micro_batch, visual_tokens
from rollplex.core.config import AblationConfig, LossConfig, MeshSection, OptimizerConfig, RunConfig, SamplingConfig
from rollplex.core.hbm_shares import EngineChoices
from rollplex.core.memory_sizes import GIB
from rollplex.core.phases import Phase
from rollplex.core.placement import Placement
from rollplex.core.residency import RUNTIME
from rollplex.core.work import MediaItem
from rollplex.v1.phase_service_pb2 import JoinResponse
from rollplex_client.cli.published import model_shapes

CONFIG = RunConfig(sampling=SamplingConfig(max_response_tokens=64), loss=LossConfig(kl_coef=0.1))
POOL = EngineChoices(gradients="hbm", kv_pool_bytes=3 * GIB)


@pytest.fixture
def planner(tmp_path):
    return Planner(MeshSection(runtime_dir=tmp_path, devices="cuda"), model_shapes("Qwen2.5-VL-3B"), "bfloat16")


def by_class(needs: IterationNeeds, phase: Phase) -> dict[str, int]:
    return {item.object_class: item.size_bytes for item in needs.planned(phase)}


def find(planner: Planner, config=CONFIG, tokens=(100, 300), choices=POOL, generates=True, trains=True) -> IterationNeeds:
    return planner.needs(config, tokens, choices, generates=generates, trains=trains)


def test_an_iteration_needs_what_its_prompts_take(planner):
    needs = find(planner)
    overlap = by_class(needs, Phase.OVERLAP)
    assert overlap["rollout_kv"] == 3 * GIB and overlap[RUNTIME] == 4 * GIB
    assert overlap["boundary_trainer"] == overlap["boundary_reference"] == 400 * 36 * 2 * 2 * 128 * 2
    assert {"reference_weights", "actor_snapshot"} < set(overlap) and "gradients" not in overlap
    assert {item.device for item in needs.planned(Phase.SUFFIX)} == {"cuda:0"}
    assert by_class(needs, Phase.UPDATE)["gradients"] == pytest.approx(4 * 4.07e9, rel=0.1)
    assert needs.planned(Phase.IDLE) == [] and needs.relaxed == ()
    assert by_class(find(planner, tokens=(100, 300, 300)), Phase.OVERLAP)["boundary_trainer"] > overlap["boundary_trainer"]


def test_what_the_run_leaves_out_is_not_planned(planner):
    plain = replace(CONFIG, loss=LossConfig(), optimizer=OptimizerConfig(vision_learning_rate=0.0))
    assert not {"reference_weights", "boundary_reference"} & set(by_class(find(planner, plain), Phase.OVERLAP))
    assert by_class(find(planner, plain), Phase.UPDATE)["gradients"] < by_class(find(planner), Phase.UPDATE)["gradients"]
    assert "rollout_kv" not in by_class(find(planner, generates=False), Phase.OVERLAP)
    assert set(by_class(find(planner, trains=False), Phase.OVERLAP)) == {"actor_snapshot", "rollout_kv", RUNTIME}


def test_suffixes_are_planned_by_the_responses_there_are(planner):
    assert longest_micro_batch([[10, 20, 30, 41], [1, 1, 1, 1]], 0) == 26
    assert longest_micro_batch([[10, 20, 30, 41], [1, 1, 1, 90]], 2) == 46
    # Two neighbours meet in a pass.
    assert longest_micro_batch([[10, 20], [50, 40], [2, 2]], 4) == 30
    assert longest_micro_batch([[10, 20], [50, 40], [2, 2]], 5) == 30
    assert longest_micro_batch([[10, 20], [2, 2], [50, 40]], 4) == 23, "the last one alone, as its pass is planned: with another"
    assert longest_micro_batch([[10, 20], [50, 40]], 100) == 30
    assert longest_micro_batch([[10, 20]], 100) == 15
    # Each of two replicas takes one of them.
    assert longest_micro_batch([[10, 20], [50, 40], [2, 2]], 4, replicas=2) == 45
    assert longest_micro_batch([[10, 20], [50, 40], [2, 2]], 6, replicas=2) == 23
    assert longest_micro_batch([], 0) == longest_micro_batch([], 4) == 0
    found = [by_class(planner.needs(CONFIG, [100], POOL, generates=True, trains=True, response_tokens=tokens), Phase.SUFFIX)
             for tokens in (0, 64, 8)]
    assert found[0] == found[1] and found[2]["suffix_activations"] < found[1]["suffix_activations"] / 4


def test_a_validation_of_a_serial_run_counts_its_decode(planner):
    """Prefixes, which a validation has none of, are the larger column of OVERLAP."""
    serial = replace(CONFIG, schedule="serial")
    assert by_class(find(planner, serial, trains=False), Phase.OVERLAP)["rollout_kv"] == 3 * GIB
    assert "rollout_kv" not in by_class(find(planner, serial, tokens=[20000] * 8), Phase.OVERLAP)


def test_without_a_pool_rollout_is_planned_only_under_a_budget(planner):
    free = EngineChoices()
    assert "rollout_kv" not in by_class(find(planner, choices=free), Phase.OVERLAP)
    bounded = Planner(replace(planner.mesh, hbm_budget_gib=40.0), planner.shapes, planner.dtype)
    assert by_class(find(bounded, choices=free), Phase.OVERLAP)["rollout_kv"] > 0


def test_ablations_and_a_resident_reference_relax_the_contract(planner):
    config = replace(CONFIG, ablation=AblationConfig(no_state_offload=True))
    needs = find(planner, config, choices=replace(POOL, reference="resident"))
    assert set(needs.relaxed) == {"reference_weights", "optimizer_state"}
    assert by_class(needs, Phase.SUFFIX)["optimizer_state"] > 3 * by_class(needs, Phase.SUFFIX)["reference_weights"]
    assert IterationNeeds().planned(Phase.OVERLAP) == [] and IterationNeeds().relaxed == ()


def test_engines_say_where_they_keep_things():
    joined = [JoinResponse(role="trainer", residency={"gradients": "hbm"}), JoinResponse(role="rollout", kv_pool_bytes=7),
              JoinResponse(role="reference", residency={"reference_weights": "resident"})]
    assert engine_choices(joined) == EngineChoices("hbm", "resident", 7)
    assert engine_choices([JoinResponse()]) == EngineChoices()


def test_text_asks_nothing_of_the_tower(planner):
    """Prompts are counted as what they are: text has no patches."""
    video = MediaItem("video", Placement.contiguous("m", 0, (8, 56, 84, 3), "uint8"), 2.0, "")
    vision = planner.shapes.vision
    side = vision.patch_size * vision.spatial_merge_size
    assert visual_tokens(vision, video) == -(-8 // vision.temporal_patch_size) * -(-56 // side) * -(-84 // side)

    def waiting(media):
        config = RunConfig(saved_activations="recompute")
        needs = planner.needs(config, (200, 200), POOL, generates=True, trains=True, media=media)
        return by_class(needs, Phase.OVERLAP)["prefix_activations"]

    assert waiting(([], [])) < waiting(([video], [])) < waiting(([video], [video])) < waiting(())
