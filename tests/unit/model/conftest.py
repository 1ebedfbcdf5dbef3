"""A tiny Qwen2.5-VL with random weights, its checkpoint, its layout in a slab, and prompts of every kind.

test_model_* compare against transformers' own forward, one padded row a sample, with our position ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.model import (
    ActorLayout,
    ModelConfig,
    PromptInputs,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    load_into,
    read_model_config,
)

IMAGE, VIDEO, START, END = 190, 191, 192, 193
VOCAB = 203


def tiny_hf_config(*, tied: bool = False, layers: int = 3) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )


def build_hf(*, tied: bool, dtype: torch.dtype, layers: int = 3) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights, biases and norms included, so that nothing is hidden by a zero."""
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(tiny_hf_config(tied=tied, layers=layers)).to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if "norm" in name or "ln_q" in name else noise)
    model.set_attn_implementation("sdpa")
    return model.to(dtype).eval()


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def single_rank():
    init_tensor_parallel(0, 1)
    yield
    destroy_tensor_parallel()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[bool, Path]:
    """tied? -> checkpoint directory, float64 on disk."""
    paths = {}
    for tied in (False, True):
        paths[tied] = tmp_path_factory.mktemp("checkpoint") / ("tied" if tied else "untied")
        build_hf(tied=tied, dtype=torch.float64).save_pretrained(paths[tied])
    return paths


@dataclass
class Bound:
    """Our model with its weights in a slab."""

    config: ModelConfig
    layout: ActorLayout
    slab: torch.Tensor
    rollout_views: dict[str, torch.Tensor]
    model: VisionLanguageModel


def bind_model(checkpoint: Path, dtype: torch.dtype, *, tp: int = 1, rank: int = 0) -> Bound:
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, tp, str(dtype).removeprefix("torch."))
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    rollout_views = layout.views(slab)
    training_views = layout.training_views(rollout_views)
    load_into(checkpoint, config, training_views, tp_rank=rank, tp_size=tp)
    model = VisionLanguageModel(config, dtype)
    model.bind(training_views)
    return Bound(config, layout, slab, rollout_views, model)


@pytest.fixture
def bind(single_rank, checkpoints):
    def build(dtype: torch.dtype = torch.float64, *, tied: bool = False) -> Bound:
        return bind_model(checkpoints[tied], dtype)

    return build


def _text(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, IMAGE, count).tolist()


def make_prompt(config: ModelConfig, kind: str, seed: int = 0) -> PromptInputs:
    """kind: text | one_token | image | two_images | video | image_and_video"""
    rng = np.random.default_rng(seed)
    pixels = 3 * 2 * 4 * 4

    def medium(token: int, grid: list[int]) -> list[int]:
        return [START, *[token] * (int(np.prod(grid)) // 4), END]

    images = {"image": [[1, 6, 8]], "two_images": [[1, 4, 6], [1, 8, 4]], "image_and_video": [[1, 4, 4]]}.get(kind, [])
    videos = {"video": [[5, 4, 6]], "image_and_video": [[2, 6, 4]]}.get(kind, [])
    tokens = _text(rng, 1 if kind == "one_token" else 4)
    for grid in images:
        tokens += medium(IMAGE, grid) + _text(rng, 2)
    for grid in videos:
        tokens += medium(VIDEO, grid) + _text(rng, 3)
    arrays = {}
    if images:
        arrays["image_grid_thw"] = np.array(images)
        arrays["pixel_values_images"] = rng.standard_normal((np.prod(images, axis=1).sum(), pixels))
    if videos:
        arrays["video_grid_thw"] = np.array(videos)
        arrays["pixel_values_videos"] = rng.standard_normal((np.prod(videos, axis=1).sum(), pixels))
        arrays["second_per_grid_ts"] = np.array([1.7] * len(videos))
    return PromptInputs.from_arrays(config, token_ids=np.array(tokens), **arrays)


def make_responses(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, IMAGE, (length,), generator=generator) for length in lengths]
