"""The memory plan: the paper's Table 1, what fits, what is chosen, and what is advised where nothing does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rollplex.core.config import SUFFIX_MODES
from rollplex.core.errors import BadInput
from rollplex.core.memory_plan import KNOWN, RUNTIME, Choice, advice, make_plan
from rollplex.core.memory_sizes import GIB, PLAN_SCHEDULES, PlanInput, Sizes, Work
from rollplex.core.model_layout import MEGATRON_FUSED
from rollplex.core.naive_overlap import UNDETERMINED, Source, naive_overlap
from rollplex.core.residency import CONTRACT
from rollplex.core.topology import Topology
from rollplex_client.cli.published import model_shapes

WORK = Work(groups=32, samples=8, prompt_tokens=8192, response_tokens=2048, micro_batch_samples=8)


def paper(**changes) -> PlanInput:
    """The paper's node: 32B, TP 8 over 4, eight 80 GB GPUs, 1.4 TB of host memory, 32 prompts of 8k + 2k tokens."""
    given = {"shapes": model_shapes("Qwen2.5-VL-32B"), "topology": Topology(8, 4), "gpus": 8, "hbm_bytes": 80 * GIB,
             "host_bytes": 1400 * GIB, "runtime_bytes": 4 * GIB, "work": WORK}
    return PlanInput(**(given | changes))


def one_7b(**changes) -> PlanInput:
    given = {"shapes": model_shapes("Qwen2.5-VL-7B"), "topology": Topology(), "gpus": 1, "hbm_bytes": 139 * GIB,
             "host_bytes": 128 * GIB, "work": replace(WORK, prompt_tokens=4096, response_tokens=225)}
    return paper(**(given | changes))


def test_the_papers_table_1():
    """The paper's rows are those of 32.5 B parameters, the size Qwen states; its classes (and we) count 32.76 B."""
    rows = [row for row in naive_overlap(paper()) if row.source is Source.MODEL]
    assert [row.component for row in rows] == ["bfloat16 weights", "gradient buffer", "master weights", "Adam moments",
                                               "bfloat16 weights", "bfloat16 weights"]
    published = [7.6, 15.1, 15.1, 30.3, 7.6, 15.1]
    assert [row.nominal_bytes / GIB for row in rows] == pytest.approx(published, abs=0.1)
    assert [row.language_bytes / GIB for row in rows] == pytest.approx([7.63, 15.26, 15.26, 30.52, 7.63, 15.26], abs=0.01)
    assert [row.language_bytes / GIB for row in rows] == pytest.approx(published, rel=0.011)
    assert [row.tower_bytes / GIB for row in rows] == pytest.approx([1.28, 2.57, 2.57, 5.13, 1.28, 1.28], abs=0.01)


def test_rows_that_a_config_does_not_determine():
    rows = {row.component: row for row in naive_overlap(paper())}
    assert rows["preserved prefix KV (all boundaries)"].size_bytes == 16 * GIB
    assert set(UNDETERMINED) <= set(rows)
    assert rows["runtime buffers"].size_bytes == 4 * GIB
    assert sum(row.language_bytes for row in rows.values()) > 2 * 64 * GIB
    assert not [row for row in naive_overlap(paper(reference=False)) if row.role == "reference"]
    frozen = {row.component: row.tower_bytes for row in naive_overlap(paper(freeze_vision=True))}
    assert frozen["gradient buffer"] == frozen["Adam moments"] == 0 < frozen["bfloat16 weights"]


def test_the_papers_node_fits():
    plan = make_plan(paper())
    assert plan.fits and plan.kv_share == 1 and advice(plan) == []
    assert plan.choice == Choice("hbm", "pinned", "from_inputs", "recompute")
    columns = {column.name: column.hbm for column in plan.columns}
    assert list(columns) == ["OVERLAP", "SUFFIX", "PREFIX BACKWARD", "UPDATE"]
    assert "gradients" not in columns["OVERLAP"] and "rollout_kv" not in columns["SUFFIX"]
    assert set(columns["UPDATE"]) == {"actor_snapshot", "gradients", "optimizer_state", RUNTIME}
    assert columns["OVERLAP"]["actor_snapshot"] / GIB == pytest.approx(15.26 + 1.28, abs=0.01)
    assert columns["UPDATE"]["optimizer_state"] < GIB < plan.host["optimizer_state"] / 400


def test_host_bytes_of_7b_are_the_designs():
    sizes = Sizes(one_7b())
    assert (sizes.master + sizes.moments) / GIB == pytest.approx(93, abs=0.5)
    assert sizes.gradients / GIB == pytest.approx(31, abs=0.5)
    assert sizes.training_weights / GIB == pytest.approx(15.4, abs=0.1)
    plan = make_plan(one_7b())
    assert plan.fits and (plan.choice.gradients, plan.choice.reference) != ("pinned", "pinned")


def test_fused_training_keeps_its_incompatible_tensors_apart():
    snapshots = [make_plan(paper(train_layout=layout)).columns[0].hbm["actor_snapshot"] for layout in ("split", MEGATRON_FUSED)]
    assert (snapshots[1] - snapshots[0]) / GIB == pytest.approx(2.349268992e9 / 8 * 2 / GIB, abs=0.01)


def test_a_suffix_that_keeps_its_activations_is_counted():
    """Two plans that differ in nothing else; the naive table assumes checkpointed layers, as the paper does."""
    columns = {mode: {column.name: column.hbm for column in make_plan(
        paper(), Choice("pinned", "pinned", "from_inputs", mode)).columns} for mode in SUFFIX_MODES}
    kept, recomputed = columns["keep"].pop("SUFFIX"), columns["recompute"].pop("SUFFIX")
    assert columns["keep"] == columns["recompute"]
    sizes = Sizes(paper())
    assert kept.pop("suffix_activations") == sizes.suffix_activations("keep")
    assert recomputed.pop("suffix_activations") == sizes.suffix_activations("recompute") < sizes.suffix_activations("keep") / 5
    assert kept == recomputed
    activations = next(row for row in naive_overlap(paper()) if row.component.startswith("activations"))
    assert activations.size_bytes < sizes.suffix_activations("keep")


def test_short_responses_are_kept_long_ones_recomputed():
    assert make_plan(one_7b()).choice.suffix_activations == "keep"
    long = one_7b(work=replace(WORK, prompt_tokens=4096, response_tokens=8192))
    assert make_plan(long).choice.suffix_activations == "recompute"


def test_moments_shrink_only_when_asked():
    assert make_plan(paper(host_bytes=400 * GIB)).given.moments_dtype == "float32"
    full, half = (Sizes(paper(moments_dtype=kind)) for kind in ("float32", "bfloat16"))
    assert (full.moments, full.master) == (2 * half.moments, half.master)


def test_less_kv_makes_samples_wait_down_to_one_group():
    plan = make_plan(paper(work=replace(WORK, groups=16, samples=64), hbm_bytes=70 * GIB))
    assert plan.fits and 0 < plan.kv_share < 1
    assert plan.columns[0].hbm["rollout_kv"] >= Sizes(plan.given).group_kv
    assert plan.columns[0].total <= plan.given.hbm_bytes


def test_explicit_choices_are_kept():
    for choice in Choice().settled():
        plan = make_plan(one_7b(hbm_bytes=4000 * GIB, host_bytes=600 * GIB), choice)
        assert plan.choice == choice and plan.fits
        assert ("gradients" in plan.host) is (choice.gradients == "pinned")
        assert ("reference_weights" in plan.host) is (choice.reference == "pinned")
        assert ("pinned_pool" in plan.host) is (choice.activations == "offload")
        update = next(column for column in plan.columns if column.name == "UPDATE")
        assert ("reference_weights" in update.hbm) is (choice.reference == "resident")


@pytest.mark.parametrize("schedule", PLAN_SCHEDULES)
def test_every_schedule_keeps_to_the_contract(schedule):
    for choice in Choice(reference="pinned").settled():
        for column in make_plan(paper(schedule=schedule), choice).columns:
            assert all(name == RUNTIME or column.phase in CONTRACT[name].hot for name in column.hbm)


def test_serial_and_disaggregated_split_the_overlap():
    serial = {column.name: column.hbm for column in make_plan(paper(schedule="serial")).columns}
    assert set(serial["ROLLOUT"]) == {"actor_snapshot", "rollout_kv", RUNTIME}
    assert "rollout_kv" not in serial["PREFIX"] and "boundary_trainer" in serial["PREFIX"]
    apart = make_plan(paper(schedule="disaggregated", rollout_gpus=4))
    columns = {column.name: column.hbm for column in apart.columns}
    assert columns["OVERLAP"]["actor_snapshot"] == Sizes(apart.given).rollout_weights, "what replicas copy is there whole"
    assert set(columns["ROLLOUT GPU"]) == {"actor_snapshot", "rollout_kv", RUNTIME}


@pytest.mark.parametrize(("micro_batch_samples", "groups", "samples"), [
    (1, 1, 1), (8, 1, 8), (15, 1, 8), (16, 2, 16), (20, 2, 16), (10000, 32, 256)])
def test_a_suffix_pass_holds_parts_of_a_group_or_whole_ones(micro_batch_samples, groups, samples):
    work = replace(WORK, micro_batch_samples=micro_batch_samples)
    assert (work.packed_groups, work.packed_samples) == (groups, samples)
    sizes, one = (Sizes(paper(work=replace(WORK, micro_batch_samples=count))) for count in (micro_batch_samples, 8))
    assert sizes.boundary_gradients == groups * one.boundary_gradients
    # Their prompts go through the prefix together, in the reference, too.
    assert sizes.prefix_working_set >= groups * one.prefix_working_set
    assert sizes.prefix_backward("from_inputs") >= groups * one.prefix_backward("from_inputs")

def test_a_reference_without_a_graph_works_on_a_layer_of_every_prompt_of_a_pass():
    """Beyond one, whose share is the runtime's. By hand, 3B at TP 1: an MLP of 11008 beside states of 2048, or of 4 patches
    a visual token 3420 beside 1280."""
    work = Work(groups=8, samples=8, prompt_tokens=4096, response_tokens=64, micro_batch_samples=32)
    given = paper(shapes=model_shapes("Qwen2.5-VL-3B"), topology=Topology(), gpus=1, work=work)
    patches = 3 * 4096 * 4 * (4 * 1280 + 3 * 3420) * 2
    assert Sizes(given).reference_prefix == patches
    text = replace(given, work=replace(work, visual_tokens=0, longest_visual_tokens=0))
    assert Sizes(text).reference_prefix == 3 * 4096 * (4 * 2048 + 3 * 11008) * 2
    plans = [make_plan(one) for one in (given, replace(given, work=replace(work, micro_batch_samples=8)))]
    four, one = (plan.columns[0].hbm["boundary_reference"] for plan in plans)
    assert four - one == patches
    shared = replace(given, topology=Topology(2, 1), gpus=2, data_parallel=True)
    assert Sizes(shared).reference_prefix * 3 == patches, "two of four, on each of two replicas"


def test_replicas_that_share_prompts_out_hold_fewer_of_them_whole():
    """A rank's prompts are half as many and their keys and values twice as wide; weights of the reference are a whole shard of
    rollout's, gradients those of all that the replica's ranks compute."""
    together, shared = Sizes(paper()), Sizes(paper(data_parallel=True))
    assert shared.groups_per_rank * 2 == together.groups_per_rank == 32
    assert shared.boundary == together.boundary and shared.reference_boundary == together.reference_boundary
    assert shared.reference_weights == pytest.approx(together.rollout_weights, rel=1e-3)
    language = together.given.layout.language_total.training_elements * together.state_item
    assert shared.gradients == together.gradients + language
    assert Sizes(paper(data_parallel=True, freeze_decoder=True)).gradients == Sizes(paper(freeze_decoder=True)).gradients
    assert shared.master == together.master and shared.layer_inputs * 2 == together.layer_inputs
    three = [Sizes(paper(data_parallel=both, work=replace(WORK, micro_batch_samples=24))) for both in (False, True)]
    assert [sizes.packed_prompts for sizes in three] == [3, 2], "replicas share a pass out, too"
    alone = Sizes(paper(data_parallel=True, reference_ranks=4))
    assert alone.reference_boundary == 2 * shared.reference_boundary, "one replica of the reference scores all prompts"
    over = make_plan(paper(data_parallel=True, hbm_bytes=66 * GIB))
    assert "no --data-parallel (mesh.data_parallel = false): fits" in advice(over)
    equal = {"topology": Topology(8, 8)}
    assert make_plan(paper(data_parallel=True, **equal)).columns == make_plan(paper(**equal)).columns


def test_more_memory_never_stops_fitting():
    fits = [make_plan(paper(hbm_bytes=size * GIB)).fits for size in range(30, 120, 5)]
    assert fits == sorted(fits) and fits[0] is False and fits[-1] is True


def test_what_does_not_fit_is_told_what_to_change():
    plan = make_plan(paper(hbm_bytes=60 * GIB))
    assert plan.hbm_over and not plan.fits
    tips = advice(plan)
    groups = next(int(tip.split()[1].rstrip(":")) for tip in tips if tip.startswith("--groups"))
    for count, expected in ((groups, True), (groups + 1, False)):
        assert make_plan(paper(hbm_bytes=60 * GIB, work=replace(WORK, groups=count))).fits is expected
    assert {"--micro-batch-samples 4: fits", "--train-tp 8 --rollout-tp 8: fits"} <= set(tips)


def test_what_lacks_host_memory_is_told_what_to_change():
    plan = make_plan(paper(host_bytes=400 * GIB))
    assert plan.host_over and "--moments bfloat16: fits" in advice(plan)
    hopeless = advice(make_plan(paper(host_bytes=20 * GIB)))
    assert hopeless and all("still lacks" in tip for tip in hopeless)
    forced = Choice(activations="keep")
    tips = advice(make_plan(paper(), forced), forced)
    assert "--gradients, --reference, --activations and --suffix-activations at auto: fits" in tips


@pytest.mark.parametrize(("build", "words"), [
    (lambda: paper(gpus=12), "gpus is 12; it must be a positive multiple of TP 8"),
    (lambda: paper(schedule="disaggregated", rollout_gpus=6), "rollout_gpus is 6"), (lambda: paper(schedule="x"), "'x' is none"),
    (lambda: paper(hbm_bytes=0), "hbm_bytes is 0"), (lambda: replace(WORK, groups=0), "groups is 0"),
    (lambda: Choice(gradients="disk"), "gradients 'disk' is none of auto, hbm, pinned")])
def test_bad_requests_are_refused_with_the_numbers(build, words):
    with pytest.raises(BadInput, match=words):
        build()


def test_choices_are_all_tried_once():
    assert len(set(Choice().settled())) == math.prod(map(len, KNOWN.values()))


def test_the_longest_prompt_sets_what_one_backward_pass_adds():
    """Prompts wait as their mean says; one of them runs again, and it may be the longest."""
    plain = Sizes(paper())
    mixed = Sizes(paper(work=replace(WORK, longest_prompt_tokens=2 * WORK.prompt_tokens)))
    assert mixed.prefix_waiting("from_inputs") == plain.prefix_waiting("from_inputs")
    for saved in ("recompute", "from_inputs"):
        assert mixed.prefix_backward(saved) == 2 * plain.prefix_backward(saved)
