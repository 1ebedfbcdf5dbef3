"""The decoder on rollout's tensors against the teacher-forced suffix on training's."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen import make_prompt, make_responses

from rollplex.core.errors import BadInput, WrongState
from rollplex.model import ActorLayout, GroupDecoder, pack_responses, prefix_forward, suffix_forward

# (prompt kind, rows): boundaries of 0 to 40 tokens, equal and unequal row counts: one lot, padded lots, several lots.
BATCHES = {
    "one_group": [("video", 3)],
    "like_groups": [("two_images", 2), ("two_images", 2), ("video", 2)],
    "mixed": [("text", 2), ("video", 3), ("one_token", 1), ("image", 3), ("one_token", 3), ("image_and_video", 3)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tied", [False, True])
def test_steps_equal_the_teacher_forced_suffix(bind, batch, tied):
    bound = bind(tied=tied)
    config, steps = bound.config, 5
    decoder = GroupDecoder(config, bound.layout, bound.rollout_views)
    groups = [(make_prompt(config, kind, seed), n) for seed, (kind, n) in enumerate(BATCHES[batch])]
    responses = make_responses([steps] * sum(n for _, n in groups))
    tokens = torch.stack(responses)
    state = decoder.start(groups, steps)
    assert state.row_count == len(responses)
    stepped = [decoder.step(state)] + [decoder.step(state, tokens[:, i]) for i in range(steps - 1)]
    decoded = torch.stack(stepped, dim=1)
    assert torch.isneginf(decoded[..., config.vocab_size :]).all()
    row = 0
    with torch.no_grad():
        for inputs, n in groups:
            packed = pack_responses(inputs.last_token, responses[row : row + n], inputs.suffix_position)
            hidden = suffix_forward(bound.model, [prefix_forward(bound.model, inputs)], packed)
            expected = torch.nn.functional.linear(hidden, bound.model.head_weight)[:, : config.vocab_size]
            found = decoded[row : row + n, :, : config.vocab_size].reshape(expected.shape)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
            row += n


def test_weights_are_rollouts_own_bytes(bind):
    bound = bind()
    decoder = GroupDecoder(bound.config, bound.layout, bound.rollout_views)
    start = bound.slab.data_ptr()
    for name, tensor in bound.layout.tensors.items():
        assert decoder.weights[name].data_ptr() == start + tensor.offset_bytes
    layer = decoder.layers[1]
    assert layer.qkv.data_ptr() == bound.rollout_views["language_model.model.layers.1.self_attn.qkv_proj.weight"].data_ptr()
    placements = bound.layout.training_placements("actor")
    for name, parameter in [*decoder.prefill.parameters_by_name().items(), *bound.model.parameters_by_name().items()]:
        assert parameter.data_ptr() == start + placements[name].offset_bytes


def test_an_update_in_place_shows_at_the_next_batch(bind):
    bound = bind()
    decoder = GroupDecoder(bound.config, bound.layout, bound.rollout_views)
    inputs = make_prompt(bound.config, "image")
    before = decoder.step(decoder.start([(inputs, 1)], 1))
    with torch.no_grad():
        bound.model.parameters_by_name()["language_model.layers.1.mlp.gate_proj.weight"].mul_(1.1)
    after = decoder.step(decoder.start([(inputs, 1)], 1))
    assert (before - after)[:, : bound.config.vocab_size].abs().max() > 1e-3


def test_the_boundary_is_held_once_a_group(bind):
    bound = bind()
    decoder = GroupDecoder(bound.config, bound.layout, bound.rollout_views)
    inputs = make_prompt(bound.config, "video")
    config = bound.config
    per_token = 2 * config.layer_count * config.kv_head_count * config.head_size * 8
    state = decoder.start([(inputs, 4)], 3)
    assert state.size_bytes == per_token * (inputs.token_count - 1 + 4 * 3)
    state.release()
    assert state.size_bytes == 0


def test_misuse_is_refused(bind):
    bound = bind()
    decoder = GroupDecoder(bound.config, bound.layout, bound.rollout_views)
    inputs = make_prompt(bound.config, "text")
    state = decoder.start([(inputs, 2)], 2)
    with pytest.raises(WrongState, match="but the first"):
        decoder.step(state, torch.tensor([3, 4]))
    decoder.step(state)
    with pytest.raises(BadInput, match="for 2 rows"):
        decoder.step(state, torch.tensor([3]))
    decoder.step(state, torch.tensor([3, 4]))
    with pytest.raises(WrongState, match="all 2 tokens"):
        decoder.step(state, torch.tensor([3, 4]))
    with pytest.raises(BadInput):
        decoder.start([(inputs, 0)], 2)
    with pytest.raises(BadInput, match="size 2 in a group of 1"):
        GroupDecoder(bound.config, ActorLayout.build(bound.config, 2, "float64"), bound.rollout_views)
