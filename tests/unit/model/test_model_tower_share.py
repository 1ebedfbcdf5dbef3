"""Which rank computes which time steps of a prompt's media; test_model_tensor_parallel has that ranks together train as one."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen import make_prompt

from rollplex.model.activations import run_plain
from rollplex.model.tower_share import shares, summed_over_ranks
from rollplex.model.vision import encode


def found(grid: list[list[int]], ranks: int) -> list[tuple[list[list[int]], int, int]]:
    return [(share.grid_thw.tolist(), share.start, share.stop) for share in shares(torch.tensor(grid), ranks)]


@pytest.mark.parametrize(("grid", "ranks", "expected"), [
    ([[4, 2, 2]], 1, [([[4, 2, 2]], 0, 16)]),
    ([[4, 2, 2]], 2, [([[2, 2, 2]], 0, 8), ([[2, 2, 2]], 8, 16)]),
    # A video of an odd number of steps: the one in the middle is the second rank's.
    ([[3, 2, 2]], 2, [([[1, 2, 2]], 0, 4), ([[2, 2, 2]], 4, 12)]),
    # An image is one step, and cannot be shared.
    ([[1, 4, 6]], 2, [([], 0, 0), ([[1, 4, 6]], 0, 24)]),
    ([[1, 2, 2], [1, 2, 2]], 2, [([[1, 2, 2]], 0, 4), ([[1, 2, 2]], 4, 8)]),
    # A large medium next to small ones: by patches, not by number.
    ([[1, 8, 8], [2, 2, 2], [2, 2, 4]], 2, [([[1, 8, 8]], 0, 64), ([[2, 2, 2], [2, 2, 4]], 64, 88)]),
    ([[2, 2, 2]], 4, [([], 0, 0), ([[1, 2, 2]], 0, 4), ([], 4, 4), ([[1, 2, 2]], 4, 8)])], ids=str)
def test_steps_of_media(grid, ranks, expected):
    assert found(grid, ranks) == expected


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_are_all_of_it_in_order_and_no_larger_than_a_step_more_than_even(ranks):
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(50):
        grid = torch.randint(1, 12, (int(torch.randint(1, 5, (), generator=generator)), 3), generator=generator)
        parts = shares(grid, ranks)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == int(grid.prod(-1).sum())
        steps = [(height, width) for part in parts for t, height, width in part.grid_thw.tolist() for _ in range(t)]
        assert steps == [(height, width) for t, height, width in grid.tolist() for _ in range(t)]
        largest = int(grid[:, 1:].prod(-1).max())
        assert max(part.stop - part.start for part in parts) <= parts[-1].stop / ranks + largest


@pytest.mark.parametrize("kind", ["video", "two_images", "image_and_video"])
def test_a_step_has_the_same_features_in_any_company(bind, exact, kind):
    bound = bind()
    inputs = make_prompt(bound.config, kind)
    media = (inputs.pixel_values_images, inputs.image_grid_thw), (inputs.pixel_values_videos, inputs.video_grid_thw)
    for pixels, grid in media:
        if pixels is None:
            continue
        whole = encode(bound.model.visual, pixels.double(), grid, run_plain)
        parts = [encode(bound.model.visual, pixels[part.start:part.stop].double(), part.grid_thw, run_plain)
                 for part in shares(grid, 3) if part.stop > part.start]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_what_ranks_hold_parts_of(bind):
    names = bind().model.parameters_by_name()
    summed = {name for name in names if summed_over_ranks(name)}
    assert summed and all(name.split(".")[0] == "visual" for name in summed)
    assert {name.split(".")[0] for name in names.keys() - summed} <= {"language_model", "lm_head"}
