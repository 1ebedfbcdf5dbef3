"""Phases, chunks, advantages, schedule, equation 1, placements, seeds."""

from __future__ import annotations

import math
import random

import pytest

from rollplex.core.advantages import advantages, has_signal
from rollplex.core.chunks import split_chunks
from rollplex.core.config import OptimizerConfig
from rollplex.core.errors import BadInput, WrongState
from rollplex.core.ids import check_run_name, sample_seed
from rollplex.core.learning_rate import learning_rate_factor
from rollplex.core.overlap import OverlapEstimate
from rollplex.core.phases import TRANSITIONS, Phase, PhaseEvent, next_phase
from rollplex.core.placement import Placement, align_up

EXPECTED_TRANSITIONS = {
    ("idle", "begin"): "overlap",
    ("overlap", "responses_fixed"): "suffix", ("overlap", "ended"): "idle",
    ("suffix", "readers_quiesced"): "update", ("suffix", "ended"): "idle",
    ("update", "published"): "idle", ("update", "next_mini_batch"): "suffix",
    ("update", "gradient_lost"): "suffix",
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(PhaseEvent))
def test_every_phase_and_event(phase, event):
    expected = EXPECTED_TRANSITIONS.get((phase.value, event.value))
    if expected is None:
        with pytest.raises(WrongState):
            next_phase(phase, event)
    else:
        assert next_phase(phase, event) is Phase(expected)


def test_the_table_has_no_more_rows():
    assert len(TRANSITIONS) == len(EXPECTED_TRANSITIONS)


def test_update_goes_back_to_the_old_snapshot_only_where_the_gradient_is_lost():
    assert all(event in (PhaseEvent.PUBLISHED, PhaseEvent.NEXT_MINI_BATCH, PhaseEvent.GRADIENT_LOST)
               for phase, event in TRANSITIONS if phase is Phase.UPDATE)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_cover_everything_once_and_are_balanced(seed):
    rng = random.Random(seed)
    sizes = [(f"p{index}", rng.randint(1, 500)) for index in range(rng.randint(1, 30))]
    limit = rng.randint(1, 300)
    chunks = split_chunks(sizes, limit)
    elements = [(span.name, position) for chunk in chunks for span in chunk.spans
                for position in range(span.start, span.stop)]
    assert elements == [(name, position) for name, count in sizes for position in range(count)]
    counts = [chunk.element_count for chunk in chunks]
    assert max(counts) <= limit
    assert max(counts) - min(counts) <= 1


def test_no_chunks_of_nothing():
    assert split_chunks([], 5) == []
    with pytest.raises(ValueError, match="at least one element"):
        split_chunks([("a", 1)], 0)


def test_grpo_advantages_by_hand():
    # mean 0.5, unbiased std sqrt(1/3)
    scale = 1 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages([1, 0, 1, 0]) == pytest.approx([0.5 * scale, -0.5 * scale, 0.5 * scale, -0.5 * scale], rel=1e-15)


def test_other_estimators_by_hand():
    assert advantages([1, 0, 0], "dr_grpo") == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages([1, 0, 0], "rloo") == pytest.approx([1 - 0, 0 - 0.5, 0 - 0.5])


def test_equal_rewards_give_exact_zeros():
    # 0.9 is not dyadic: its float32 mean over 8 differs from it, which is what makes other systems' advantages noisy.
    assert advantages([0.9] * 8) == [0.0] * 8
    assert advantages([1.3, None, 1.3]) == [0.0, 0.0, 0.0]
    assert not has_signal([0.9, 0.9, None])


def test_an_unscored_sample_is_left_out_of_mean_and_std():
    with_none, without = advantages([1.0, None, 0.0, 0.5]), advantages([1.0, 0.0, 0.5])
    assert with_none == [without[0], 0.0, without[1], without[2]]
    assert advantages([None, None]) == [0.0, 0.0]
    assert advantages([1.0, None]) == [0.0, 0.0]


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, math.nan])
    with pytest.raises(ValueError, match="estimator"):
        advantages([1.0], "gae")


def test_learning_rate_schedule():
    linear = OptimizerConfig(schedule="linear", warmup_steps=2, total_steps=6)
    assert [learning_rate_factor(linear, step) for step in range(1, 8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimizerConfig(schedule="cosine", total_steps=4)
    assert [learning_rate_factor(cosine, step) for step in (1, 3, 5)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate_factor(OptimizerConfig(warmup_steps=4), 1) == 0.25


def test_equation_one():
    estimate = OverlapEstimate(decode_s=10, prefix_s=6, post_s=5, decode_slowdown_s=2)
    assert (estimate.serial_s, estimate.overlap_s) == (21, 17)
    assert estimate.serial_s - estimate.overlap_s == 4  # min(T_P - dD, T_D)


def test_placement_arithmetic():
    placement = Placement.contiguous("slab", 64, (4, 8), "float32")
    assert (placement.size_bytes, placement.end_bytes) == (128, 192)
    rows = placement.narrow(0, 1, 3)
    assert (rows.offset_bytes, rows.shape, rows.end_bytes) == (64 + 32, (2, 8), 160)
    transposed = Placement("slab", 0, (8, 4), (1, 8), "bfloat16")
    assert transposed.end_bytes == 64
    with pytest.raises(ValueError, match="3:5 along axis 0"):
        placement.narrow(0, 3, 5)
    with pytest.raises(ValueError, match="multiple"):
        Placement.contiguous("slab", 2, (1,), "float32")
    assert (align_up(1, 256), align_up(256, 256)) == (256, 256)


def test_seeds_differ_in_every_part_and_repeat():
    seeds = {sample_seed(*parts) for parts in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert sample_seed(0, 1, 2, 3) == sample_seed(0, 1, 2, 3)


@pytest.mark.parametrize("name", ["", "-a", "A", "a_b", "a" * 64])
def test_bad_run_names(name):
    with pytest.raises(BadInput):
        check_run_name(name)
