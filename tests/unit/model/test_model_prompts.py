"""Positions by the model's definition, and prompts that do not add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_qwen import END, IMAGE, START, VIDEO, make_prompt

from rollplex.core.errors import BadInput
from rollplex.model import PromptInputs, mrope_positions, read_model_config


@pytest.fixture(scope="module")
def config(checkpoints):
    return read_model_config(checkpoints[False])


def test_text_counts_on_every_axis(config):
    positions, delta = mrope_positions([5, 6, 7], config)
    assert positions.tolist() == [[0, 1, 2]] * 3 and delta == 0


def test_image_by_hand(config):
    """1 x 4 x 6 patches are 2 x 3 features; text resumes after the widest axis."""
    tokens = [5, START, *[IMAGE] * 6, END, 7]
    positions, delta = mrope_positions(tokens, config, image_grid_thw=[[1, 4, 6]])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == 7 - 10


def test_text_after_a_video_resumes_after_its_time_axis(config):
    """3 steps of 1.3 s at 2 tokens a second: 0, 2.6, 5.2, truncated; the time axis is longer than height and width."""
    tokens = [5, START, *[VIDEO] * 6, END, 7]
    positions, delta = mrope_positions(tokens, config, video_grid_thw=[[3, 2, 4]], second_per_grid_ts=[1.3])
    assert positions.tolist() == [
        [0, 1, 2, 2, 4, 4, 7, 7, 8, 9],
        [0, 1, 2, 2, 2, 2, 2, 2, 8, 9],
        [0, 1, 2, 3, 2, 3, 2, 3, 8, 9],
    ]
    assert delta == 0


def test_video_without_timing_and_several_media(config):
    tokens = [*[VIDEO] * 2, *[IMAGE] * 1, *[VIDEO] * 1, 9]
    positions, _ = mrope_positions(tokens, config, image_grid_thw=[[1, 2, 2]], video_grid_thw=[[2, 2, 2], [1, 2, 2]])
    assert positions[0].tolist() == [0, 2, 3, 4, 5]
    assert positions[1].tolist() == [0, 0, 3, 4, 5]


def published_rope_index(tokens, config, images, videos, seconds) -> tuple[torch.Tensor, int]:
    """The definition as published with the model, in its own words: float32 time, truncated, resume at max + 1."""
    pieces, start, image, video = [], 0, 0, 0
    while True:
        media = [i for i in range(start, len(tokens)) if tokens[i] in (IMAGE, VIDEO)]
        first = pieces[-1].max() + 1 if pieces else 0
        if not media:
            pieces.append(torch.arange(len(tokens) - start).expand(3, -1) + first)
            break
        text = media[0] - start
        pieces.append(torch.arange(text).expand(3, -1) + first)
        if tokens[media[0]] == IMAGE:
            (t, h, w), second, image = images[image], 0.0, image + 1
        else:
            (t, h, w), second, video = videos[video], seconds[video], video + 1
        h, w = h // 2, w // 2
        time = (torch.arange(t).view(-1, 1).expand(-1, h * w) * second * config.tokens_per_second).long().flatten()
        height = torch.arange(h).view(1, -1, 1).expand(t, -1, w).flatten()
        width = torch.arange(w).view(1, 1, -1).expand(t, h, -1).flatten()
        pieces.append(torch.stack((time, height, width)) + text + first)
        start = media[0] + t * h * w
    positions = torch.cat(pieces, dim=1)
    return positions, int(positions.max()) + 1 - len(tokens)


def test_random_prompts_against_the_published_definition(config):
    rng = np.random.default_rng(3)
    for _ in range(60):
        tokens, images, videos, seconds = [], [], [], []
        for _ in range(rng.integers(0, 5)):
            tokens += rng.integers(3, 100, rng.integers(1, 5)).tolist()
            video = bool(rng.integers(2))
            grid = [int(rng.integers(1, 6)) if video else 1, *(int(2 * n) for n in rng.integers(1, 5, 2))]
            (videos if video else images).append(grid)
            if video:
                seconds.append(float(np.float32(2 / rng.uniform(0.5, 30))))
            tokens += [VIDEO if video else IMAGE] * (int(np.prod(grid)) // 4)
        tokens += rng.integers(3, 100, 3).tolist()
        positions, delta = mrope_positions(tokens, config, images or None, videos or None, seconds or None)
        expected, expected_delta = published_rope_index(tokens, config, images, videos, seconds)
        assert torch.equal(torch.from_numpy(positions), expected) and delta == expected_delta


def test_placeholders_must_match_the_media(config):
    pixels = np.zeros((24, 96), dtype=np.float32)
    with pytest.raises(BadInput, match="image features and image tokens do not match: 5 tokens, 6 features"):
        PromptInputs.from_arrays(
            config, token_ids=[5, *[IMAGE] * 5, 7], pixel_values_images=pixels, image_grid_thw=np.array([[1, 4, 6]])
        )
    with pytest.raises(BadInput, match="video features and video tokens do not match: 1 tokens, 0 features"):
        PromptInputs.from_arrays(config, token_ids=[5, VIDEO, 7])
    with pytest.raises(BadInput, match="run at token 1 is shorter"):
        PromptInputs.from_arrays(
            config,
            token_ids=[5, *[IMAGE] * 3, 8, *[IMAGE] * 3, 7],
            pixel_values_images=pixels,
            image_grid_thw=np.array([[1, 4, 6]]),
        )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"token_ids": []}, "at least one token"),
        ({"token_ids": [5, 203]}, "token id 203 lies outside the vocabulary of 203"),
        ({"token_ids": [-1, 5]}, "token id -1"),
        ({"token_ids": [5], "image_grid_thw": np.array([[1, 4, 4]])}, "together or not at all"),
        (
            {"token_ids": [5], "image_grid_thw": np.array([[1, 4, 4]]), "pixel_values_images": np.zeros((15, 96))},
            r"shape \(15, 96\)",
        ),
        (
            {"token_ids": [5], "image_grid_thw": np.array([[1, 3, 4]]), "pixel_values_images": np.zeros((12, 96))},
            "multiples of 2",
        ),
        (
            {
                "token_ids": [VIDEO, 5],
                "video_grid_thw": np.array([[1, 2, 2]]),
                "pixel_values_videos": np.zeros((4, 96)),
                "second_per_grid_ts": np.array([1.0, 2.0]),
            },
            r"for 1 video\(s\)",
        ),
        (
            {
                "token_ids": [5, IMAGE],
                "image_grid_thw": np.array([[1, 2, 2]]),
                "pixel_values_images": np.zeros((4, 96)),
            },
            "ends inside a medium",
        ),
    ],
)
def test_bad_prompts_are_refused(config, arrays, message):
    with pytest.raises(BadInput, match=message):
        PromptInputs.from_arrays(config, **arrays)


def test_hash_tells_prompts_apart(config):
    hashes = {make_prompt(config, kind, seed).hash() for kind in ("text", "video", "image") for seed in range(3)}
    assert len(hashes) == 9
    assert make_prompt(config, "video", 1).hash() == make_prompt(config, "video", 1).hash()
