"""The four ablations in the plan: each takes more than full Rollplex, where the paper says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollplex.core.config import AblationConfig, OptimizerConfig, RunConfig
from rollplex.core.hbm_shares import EngineChoices, as_toml, plan_keys, role_share
from rollplex.core.memory_plan import Choice, Plan, make_plan
from rollplex.core.memory_sizes import GIB, PlanInput, Sizes, Work
from rollplex.core.phases import Phase
from rollplex.core.residency import CONTRACT, Holding, Residency, check, relaxed_classes
from rollplex.core.topology import Topology
from rollplex_client.cli.published import model_shapes

NAMES = ("no_state_offload", "rollout_resident", "unchunked_optimizer", "no_weight_sharing")
CHOICE = Choice("hbm", "pinned", "from_inputs", "recompute")


def given(**changes) -> PlanInput:
    """7B on one GPU, with host memory enough for every ablation."""
    base = {"shapes": model_shapes("Qwen2.5-VL-7B"), "topology": Topology(device_kind="cuda"), "gpus": 1,
            "hbm_bytes": 139 * GIB, "host_bytes": 2000 * GIB, "runtime_bytes": 4 * GIB,
            "work": Work(groups=32, samples=8, prompt_tokens=4096, response_tokens=1024, micro_batch_samples=8)}
    return PlanInput(**(base | changes))


def at_its_own_peak() -> Plan:
    """Full Rollplex under the smallest budget that it keeps with KV for all samples."""
    return make_plan(given(hbm_bytes=make_plan(given(), CHOICE).peak.total), CHOICE)


@pytest.mark.parametrize("name", NAMES)
def test_each_ablation_exceeds_the_budget_that_full_rollplex_keeps(name):
    full = at_its_own_peak()
    ablated = make_plan(replace(full.given, ablation=AblationConfig(**{name: True}), kv_pool_bytes=Sizes(full.given).rollout_kv),
                        CHOICE)
    assert full.fits and full.kv_share == 1
    assert ablated.hbm_over > 0 and not ablated.host_over
    assert ablated.peak.total > full.peak.total


def test_what_each_ablation_adds():
    ample = given(hbm_bytes=1000 * GIB)
    full, sizes = make_plan(ample, CHOICE), Sizes(ample)

    def added(name: str, phase: Phase) -> dict[str, int]:
        plan = make_plan(replace(ample, ablation=AblationConfig(**{name: True})), CHOICE)
        before, after = full.needs(phase), plan.needs(phase)
        return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}

    state = sizes.master + sizes.moments
    assert added("no_state_offload", Phase.OVERLAP) == {"optimizer_state": state + sizes.spare_slots}
    assert added("rollout_resident", Phase.UPDATE) == {"rollout_kv": sizes.rollout_kv}
    assert added("unchunked_optimizer", Phase.UPDATE) == {"optimizer_state": 2 * state - sizes.update_window}, (
        "state, and AdamW's temporaries of all of it")
    assert added("unchunked_optimizer", Phase.SUFFIX) == {}
    for phase in (Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE):
        assert added("no_weight_sharing", phase) == {"actor_snapshot": sizes.rollout_weights}
    assert full.needs(Phase.IDLE) == {}


def test_a_resident_rollout_keeps_what_it_had():
    """KV is cut to the room beside the prefixes, and stays at that size."""
    plan = make_plan(given(hbm_bytes=70 * GIB, ablation=AblationConfig(rollout_resident=True)), CHOICE)
    sizes = {column.hbm["rollout_kv"] for column in plan.columns}
    assert len(sizes) == 1 and plan.kv_share < 1


def test_an_unchunked_update_is_one_chunk():
    config = RunConfig(optimizer=OptimizerConfig(chunk_elements=7), ablation=AblationConfig(unchunked_optimizer=True))
    assert config.streamed_optimizer.chunk_elements > 1 << 38
    assert replace(config, ablation=AblationConfig()).streamed_optimizer is config.optimizer


def test_relaxed_classes_may_be_hot_and_no_others():
    assert relaxed_classes(AblationConfig()) == ()
    relaxed = relaxed_classes(AblationConfig(no_state_offload=True, rollout_resident=True), reference_resident=True)
    assert set(relaxed) == {"reference_weights", "optimizer_state", "rollout_kv"}
    for name, row in CONTRACT.items():
        held = [Holding(name, min(row.roles), "cuda:0", Residency.HBM, 1)]
        assert bool(check(Phase.IDLE, held, relaxed)) is (Phase.IDLE not in row.hot and name not in relaxed)
    assert check(Phase.IDLE, [Holding("rollout_kv", "trainer", "cuda:0", Residency.HBM, 1)], relaxed), "roles still count"


def test_a_pool_of_keys_and_values_is_counted_as_it_is():
    plan = make_plan(given(kv_pool_bytes=3 * GIB), CHOICE)
    assert plan.needs(Phase.OVERLAP)["rollout_kv"] == 3 * GIB
    assert plan.kv_share == 3 * GIB / Sizes(given()).rollout_kv < 1


def test_needs_are_told_for_every_device_of_the_topology():
    plan = make_plan(given(topology=Topology(2, 1, device_kind="host"), gpus=2), CHOICE)
    planned = plan.planned(Phase.UPDATE)
    assert {item.device for item in planned} == {"host:0", "host:1"}
    assert sum(item.size_bytes for item in planned) == 2 * sum(plan.needs(Phase.UPDATE).values())


def test_a_reference_of_fewer_ranks_sits_on_the_first_devices():
    whole = make_plan(given(), CHOICE).needs(Phase.OVERLAP)
    plan = make_plan(given(topology=Topology(2, 1), gpus=2, reference_ranks=1), CHOICE)
    by_device = {(item.device, item.object_class): item.size_bytes for item in plan.planned(Phase.OVERLAP)}
    for name in ("reference_weights", "boundary_reference"):
        assert by_device["host:0", name] == whole[name] and ("host:1", name) not in by_device
    assert by_device["host:1", "boundary_trainer"] == whole["boundary_trainer"] // 2
    assert plan.host["reference_weights"] == make_plan(given(), CHOICE).host["reference_weights"]


def test_one_long_prompt_does_not_count_for_all():
    work = given().work
    mixed = make_plan(given(work=replace(work, longest_prompt_tokens=16384)), CHOICE)
    alike = make_plan(given(), CHOICE)
    longest = make_plan(given(work=replace(work, prompt_tokens=16384)), CHOICE)
    totals = [plan.needs(Phase.OVERLAP)["boundary_trainer"] for plan in (alike, mixed, longest)]
    assert totals[0] == totals[1] < totals[2]
    assert mixed.needs(Phase.SUFFIX)["boundary_trainer"] > alike.needs(Phase.SUFFIX)["boundary_trainer"]


def test_a_plan_as_options():
    plan = at_its_own_peak()
    keys = plan_keys(plan)
    assert keys["trainer"]["gradients"] == "hbm" and keys["reference"]["weights"] == "paged"
    assert keys["rollout.vllm"]["kv_cache_gib"] == pytest.approx(Sizes(plan.given).rollout_kv / GIB, abs=0.01)
    assert keys["mesh"]["hbm_budget_gib"] * GIB >= plan.peak.total
    assert EngineChoices(keys["trainer"]["gradients"], keys["reference"]["weights"]).as_plan() == {
        "gradients": plan.choice.gradients, "reference": plan.choice.reference}
    text = as_toml(keys)
    assert '[rollout.vllm]\nkv_cache_gib = ' in text and 'saved_activations = "from_inputs"\n' in text


def test_shares_hold_what_a_role_allocates_itself():
    plan = at_its_own_peak()
    suffix = next(column.hbm for column in plan.columns if column.name == "SUFFIX")
    own = suffix["boundary_trainer"] + suffix["suffix_activations"] + suffix["gradients"]
    assert role_share(plan, "trainer") >= own + plan.given.runtime_bytes
    assert role_share(plan, "rollout") == Sizes(plan.given).rollout_kv * 11 // 10 + plan.given.runtime_bytes
    assert role_share(plan, "reference") < role_share(plan, "trainer")
