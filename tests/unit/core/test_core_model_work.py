"""Counts against ones made by hand, and against what torch counts on the real modules."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

from rollplex.core.errors import BadInput  # noqa: E402
from rollplex.core.model_work import GroupWork, ModelWork, PromptSize, tokens_of  # noqa: E402
from rollplex.core.shapes import ModelShapes, VisionShapes, shapes_from_config  # noqa: E402
from rollplex_client.cli.published import PUBLISHED, model_shapes  # noqa: E402

SMALL = ModelShapes(64, 96, 3, 4, 2, 320, False, VisionShapes(
    depth=4, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, fullatt_block_indexes=(3,)))
WORK = ModelWork(SMALL)


def torch_flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def model():
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                     "num_attention_heads": 4, "num_key_value_heads": 2,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "patch_size": 14, "fullatt_block_indexes": [3], "window_size": 112})
    return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def test_the_decoder_is_what_torch_counts(model):
    tokens = 24
    counted = torch_flops(lambda: model.model.language_model(inputs_embeds=torch.zeros(1, tokens, 64)))
    # torch's eager attention computes the whole square; causal is (n + 1) / 2n of it.
    square = SMALL.layer_count * 4 * SMALL.head_count * SMALL.head_size * tokens * tokens
    causal = SMALL.layer_count * 4 * SMALL.head_count * SMALL.head_size * tokens * (tokens + 1) // 2
    rotary = 2 * 3 * tokens * SMALL.head_size // 2  # angles: a product of positions and frequencies, not worth counting
    assert counted - square + causal == pytest.approx(WORK.decoder(tokens), abs=rotary)
    assert torch_flops(lambda: model.lm_head(torch.zeros(5, 64))) == 5 * WORK.head


def test_the_tower_is_what_torch_counts(model):
    # Two frame pairs of one whole window: every block sees 64 patches of its frame.
    grid = torch.tensor([[2, 8, 8]])
    counted = torch_flops(lambda: model.model.visual(torch.zeros(128, 3 * 2 * 14 * 14), grid_thw=grid))
    assert counted == pytest.approx(WORK.vision([(2, 8, 8)]), rel=2e-3)


def test_windows_and_whole_frames_are_told_apart():
    """16 x 16 patches: four windows of 64; the full block sees 256."""
    per_pair = 4 * 32 * 256 * (3 * 64 + 256)
    linear = WORK.vision([(1, 8, 8)]) - 4 * 32 * 64 * 4 * 64
    assert WORK.vision([(1, 16, 16)]) == 4 * linear + per_pair
    assert WORK.vision([(3, 16, 16)]) == 3 * WORK.vision([(1, 16, 16)])
    assert WORK.vision([]) == 0


def test_prefix_and_suffix_together_are_the_whole_sequence():
    prompt = PromptSize(40)
    assert WORK.prefix(prompt) + WORK.suffix(prompt, 12) == WORK.decoder(52) + 12 * WORK.head


def test_a_step_counts_every_role():
    group = GroupWork(PromptSize(40, ((1, 8, 8),)), (5, 9))
    prefix, suffix = WORK.prefix(group.prompt), sum(WORK.suffix(group.prompt, length) for length in group.lengths)
    assert WORK.step([group], reference=False) == (prefix + WORK.head + suffix) + 3 * (prefix + suffix)
    assert WORK.step([group], reference=True) - WORK.step([group], reference=False) == prefix + suffix
    apart = WORK.step([group], reference=False, shared=False) - WORK.step([group], reference=False)
    assert apart == 3 * prefix
    assert WORK.step([group, group], reference=True) == 2 * WORK.step([group], reference=True)
    assert tokens_of([group, group]) == (80, 28)


def test_decoding_reads_weights_and_context():
    kv, weights = WORK.kv_token_bytes(2), WORK.decode_weight_bytes(2)
    assert kv == 2 * 3 * 2 * 16 * 2
    group = GroupWork(PromptSize(10), (1, 3))
    # Two steps after prefill, of the second sample alone, over 11 and 12 tokens.
    assert WORK.decode_bytes([group], 2, shared=False) == 2 * weights + (2 * 10 + 1 + 2) * kv
    pair = GroupWork(PromptSize(10), (3, 3))
    assert WORK.decode_bytes([pair], 2, shared=False) == 2 * weights + 2 * (20 + 3) * kv
    assert WORK.decode_bytes([pair], 2, shared=True) == 2 * weights + (20 + 2 * 3) * kv


def test_7b_has_the_published_sizes():
    """About 2 x 7.07 G a token in layers and head, 56 KiB of KV a token."""
    work = ModelWork(model_shapes("Qwen2.5-VL-7B"))
    assert work.decode_weight_bytes(2) == pytest.approx(2 * 7.07e9, rel=0.01)
    assert work.kv_token_bytes(2) == 57344
    assert (2 * work.shapes.layer_count * work.layer_parameters + work.head) == pytest.approx(2 * 7.07e9, rel=0.01)


def test_a_tower_without_its_own_blocks_listed_is_refused_when_they_are_no_list():
    raw = json.loads((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    assert shapes_from_config(raw, "x").vision.window_patches == 64
    raw["vision_config"]["fullatt_block_indexes"] = "7"
    with pytest.raises(BadInput, match="fullatt_block_indexes"):
        shapes_from_config(raw, "x")
