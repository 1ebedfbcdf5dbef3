"""The memory plan's account of activations against what autograd is seen to save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_qwen import bind_model, tiny_hf_config

from rollplex.core.memory_sizes import PlanInput, Sizes, Work
from rollplex.core.shapes import read_shapes
from rollplex.core.topology import Topology
from rollplex.model import PromptInputs, pack_responses, prefix_forward, prefix_pass, suffix_forward, token_logprobs
from rollplex.trainer.saved_bytes import SavedBytes

# isort: split
# After rollplex.model, which makes torchvision importable.
from transformers import Qwen2_5_VLForConditionalGeneration

PROMPT, SAMPLES, RESPONSE = 33, 4, 64


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose layers are wide enough that masks and indices do not count."""
    config = tiny_hf_config(layers=4)
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_attention_heads, text.num_key_value_heads = 512, 1408, 8, 2
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    config.vision_config.out_hidden_size = 512
    path = tmp_path_factory.mktemp("wide")
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def bound(request, wide, single_rank):
    return request.param, bind_model(wide, getattr(torch, request.param))


@pytest.fixture
def sizes(wide, bound):
    work = Work(groups=1, samples=SAMPLES, prompt_tokens=PROMPT, response_tokens=RESPONSE, micro_batch_samples=SAMPLES)
    return Sizes(PlanInput(shapes=read_shapes(wide), topology=Topology(), gpus=1, hbm_bytes=1, host_bytes=1, runtime_bytes=0,
                           dtype=bound[0], freeze_vision=True, work=work))


@pytest.mark.parametrize("saved", ["keep", "recompute"])
def test_suffix_activations(bound, sizes, saved):
    model = bound[1].model
    boundary = prefix_forward(model, _text(bound[1].config))
    packed = pack_responses(5, [torch.arange(3, 3 + RESPONSE)] * SAMPLES, PROMPT)
    counter = SavedBytes([*model.parameters(), *(leaf for pair in boundary.leaves() for leaf in pair)])
    with counter.counting():
        token_logprobs(model, suffix_forward(model, [boundary], packed, saved), packed.targets)
    working = sizes.layer_working_set(SAMPLES * RESPONSE) + sizes.logits(SAMPLES * RESPONSE)
    assert counter.size_bytes == pytest.approx(sizes.suffix_activations(saved) - working, rel=0.03)


@pytest.mark.parametrize("saved", ["keep", "recompute"])
def test_prefix_activations(bound, sizes, saved):
    """The last layer of a prompt ends at its keys and values, so that the plan counts up to a layer too much."""
    model = bound[1].model
    counter = SavedBytes(model.parameters())
    with counter.counting():
        prefix_forward(model, _text(bound[1].config), saved)
    planned = sizes.prefix_waiting(saved)
    assert 0.7 * planned <= counter.size_bytes <= planned


def test_prompts_in_a_row_keep_what_each_does_and_their_attentions_output_once_more(bound, sizes):
    model, inputs = bound[1].model, _text(bound[1].config)
    counters = []
    for count in (1, 3):
        counters.append(SavedBytes(model.parameters()))
        with counters[-1].counting():
            prefix_pass(model, [inputs] * count, "keep")
    alone, together = (counter.size_bytes for counter in counters)
    three = replace(sizes.given, work=replace(sizes.given.work, groups=3, micro_batch_samples=3 * SAMPLES))
    # The last layer ends at its keys and values: it keeps none of what is compared here.
    rows = (Sizes(three).prefix_waiting("keep") - 3 * sizes.prefix_waiting("keep")) * (1 - 1 / sizes.given.shapes.layer_count)
    assert rows > 0
    assert together == pytest.approx(3 * alone + rows * (PROMPT - 1) / PROMPT, rel=0.01)


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_prefix_activations_of_a_video(wide, bound, saved):
    """Tower, merger and patches make up most of it: what is planned is what is kept, the text's last layer aside."""
    model = bound[1].model
    inputs, planned = _video(wide, bound)
    counter = SavedBytes(model.parameters())
    with counter.counting():
        prefix_forward(model, inputs, saved)
    kept = counter.size_bytes + (inputs.size_bytes if saved == "from_inputs" else 0)
    # Beside it, indices and positions of a few bytes a token.
    assert 0.8 * planned.prefix_waiting(saved) <= kept <= planned.prefix_waiting(saved) + 64 * inputs.token_count


@pytest.mark.parametrize("count", [1, 3])
def test_what_runs_again_keeps_layer_inputs_and_of_several_prompts_patches_in_a_row(wide, bound, count):
    """It runs again as `recompute` runs the first time, from patches that wait."""
    model = bound[1].model
    inputs, planned = _video(wide, bound, groups=count)
    waiting = SavedBytes([*model.parameters(), inputs.pixel_values_videos])
    with waiting.counting():
        prefix_pass(model, [inputs] * count, "recompute")
    again = planned.prefix_backward("from_inputs") - planned.prefix_working_set
    assert 0.95 * again <= waiting.size_bytes <= again + 64 * count * inputs.token_count


def _video(wide, bound, groups: int = 1) -> tuple[PromptInputs, Sizes]:
    """A prompt that is a video, as it waits, and a plan of so many of them in one pass."""
    dtype, (model, config) = bound[0], (bound[1].model, bound[1].config)
    grid = np.array([[4, 16, 16]])
    features = int(grid.prod()) // config.spatial_merge_size**2
    tokens = np.array([config.vision_start_token_id, *[config.video_token_id] * features, config.vision_end_token_id, 5])
    channels = 3 * config.vision.temporal_patch_size * config.vision.patch_size**2
    pixels = np.random.default_rng(0).standard_normal((int(grid.prod()), channels), dtype=np.float32)
    inputs = PromptInputs.from_arrays(config, token_ids=tokens, pixel_values_videos=pixels, video_grid_thw=grid,
                                      second_per_grid_ts=np.ones(1))
    work = Work(groups=groups, samples=1, prompt_tokens=len(tokens), response_tokens=1, micro_batch_samples=groups,
                visual_tokens=features)
    return inputs.with_pixels(model.dtype), Sizes(PlanInput(
        shapes=read_shapes(wide), topology=Topology(), gpus=1, hbm_bytes=1, host_bytes=1, runtime_bytes=0, dtype=dtype,
        work=work))


def _text(config) -> PromptInputs:
    return PromptInputs.from_arrays(config, token_ids=np.arange(3, 3 + PROMPT))
