"""Packing, boundaries and log-probabilities on their own."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen import IMAGE, make_prompt, make_responses

from rollplex.core.errors import BadInput, WrongState
from rollplex.model import attention, pack_groups, pack_responses, prefix_forward, suffix_forward, token_logprobs
from rollplex.model.attention import suffix_attention, suffix_mask


def test_packing_by_hand():
    packed = pack_responses(9, [torch.tensor([1, 2, 3]), torch.tensor([4])], 20)
    assert packed.token_ids.tolist() == [9, 1, 2, 9]
    assert packed.targets.tolist() == [1, 2, 3, 4]
    assert packed.sample_index.tolist() == [0, 0, 0, 1]
    assert packed.positions.tolist() == [[20, 21, 22, 20]] * 3
    assert [part.tolist() for part in packed.split(packed.targets)] == [[1, 2, 3], [4]]


def test_empty_responses_are_refused():
    with pytest.raises(BadInput, match="response 1 of 2 is empty"):
        pack_responses(9, [torch.tensor([1]), torch.tensor([], dtype=torch.int64)], 0)
    with pytest.raises(BadInput, match="no responses"):
        pack_responses(9, [], 0)


def test_groups_are_packed_and_told_apart_again():
    groups = [pack_responses(last, make_responses(lengths), start) for last, lengths, start in ((9, [3, 2], 20), (7, [4], 5))]
    packed = pack_groups(groups).to("cpu")
    assert packed.lengths == (3, 2, 4) and packed.token_count == 9
    assert packed.token_ids.tolist() == [token for group in groups for token in group.token_ids.tolist()]
    assert packed.positions[0].tolist() == [20, 21, 22, 20, 21, 5, 6, 7, 8]
    for expected, found in zip(groups, packed.by_group(), strict=True):
        assert found.lengths == expected.lengths
        for name in ("token_ids", "targets", "sample_index", "positions"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert pack_groups(groups[:1]) is groups[0] and groups[0].by_group()[0].lengths == (3, 2)


def test_micro_batches_hold_whole_samples():
    packed = pack_responses(9, make_responses([3, 2, 7, 1, 1]), 4)
    batches = packed.micro_batches(5)
    assert [batch.lengths for batch in batches] == [(3, 2), (7,), (1, 1)]
    assert [batch.sample_index.unique().tolist() for batch in batches] == [[0, 1], [2], [3, 4]]
    assert torch.equal(torch.cat([batch.targets for batch in batches]), packed.targets)


def test_boundary_life(bind):
    bound = bind()
    inputs = make_prompt(bound.config, "image")
    boundary = prefix_forward(bound.model, inputs)
    config = bound.config
    assert boundary.attached and boundary.token_count == inputs.token_count - 1
    assert [x.shape for pair in boundary.layers for x in pair] == [(boundary.token_count, 2, 16)] * 2 * config.layer_count
    with torch.no_grad():
        assert not prefix_forward(bound.model, inputs).attached
    packed = pack_responses(inputs.last_token, make_responses([2]), inputs.suffix_position)
    suffix_forward(bound.model, [boundary], packed).sum().backward()
    boundary.backward()
    assert not boundary.attached
    boundary.backward()
    boundary.release()
    with pytest.raises(WrongState, match="released"):
        boundary.leaves()
    with pytest.raises(BadInput, match="saved='some'"):
        prefix_forward(bound.model, inputs, saved="some")


def test_a_detached_boundary_still_trains_the_suffix(bind):
    bound = bind()
    inputs = make_prompt(bound.config, "text")
    with torch.no_grad():
        boundary = prefix_forward(bound.model, inputs)
    packed = pack_responses(inputs.last_token, make_responses([2]), inputs.suffix_position)
    suffix_forward(bound.model, [boundary], packed).sum().backward()
    boundary.backward()
    assert bound.model.parameters_by_name()["language_model.layers.0.self_attn.q_proj.weight"].grad is not None


def test_frozen_modules_only(bind):
    """Only the head trains: the prefix builds no graph, and its backward is a no-op."""
    bound = bind()
    bound.model.requires_grad_(False)
    bound.model.lm_head.weight.requires_grad_(True)
    inputs = make_prompt(bound.config, "video")
    boundary = prefix_forward(bound.model, inputs, saved="keep")
    assert not boundary.attached
    packed = pack_responses(inputs.last_token, make_responses([3]), inputs.suffix_position)
    token_logprobs(bound.model, suffix_forward(bound.model, [boundary], packed), packed.targets)[0].sum().backward()
    boundary.backward()
    assert [name for name, p in bound.model.parameters_by_name().items() if p.grad is not None] == ["lm_head.weight"]


@pytest.fixture
def scored(bind):
    bound = bind()
    hidden = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    return bound, hidden, torch.randint(3, IMAGE, (9,), generator=torch.Generator().manual_seed(1))


def test_logprobs_do_not_depend_on_the_chunk(scored):
    bound, hidden, targets = scored
    results = []
    for chunk in (1, 4, 100):
        logp, entropy = token_logprobs(bound.model, hidden, targets, chunk_tokens=chunk, with_entropy=True)
        results.append((logp, entropy, *torch.autograd.grad(logp.sum(), hidden)))
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_forbidden_ids_are_outside_the_softmax(scored):
    bound, hidden, targets = scored
    forbidden = bound.config.forbidden_token_ids
    logp, entropy = token_logprobs(
        bound.model, hidden, targets, temperature=0.5, forbidden=torch.tensor(forbidden), with_entropy=True
    )
    logits = torch.nn.functional.linear(hidden, bound.model.head_weight) / 0.5
    allowed = [token for token in range(bound.config.vocab_size) if token not in forbidden]
    reference = logits[:, allowed].log_softmax(-1)
    picked = reference[torch.arange(9), torch.tensor([allowed.index(token) for token in targets.tolist()])]
    torch.testing.assert_close(logp, picked)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
    assert logp.requires_grad and not entropy.requires_grad


def test_bfloat16_weights_score_in_float32(scored, checkpoints):
    from tiny_qwen import bind_model

    bound, hidden, targets = scored
    low = bind_model(checkpoints[False], torch.bfloat16)
    logp, _ = token_logprobs(low.model, hidden.to(torch.bfloat16), targets)
    assert logp.dtype == torch.float32
    reference, _ = token_logprobs(bound.model, hidden, targets)
    assert (logp - reference).abs().max() < 0.1


def test_bfloat16_end_to_end_is_finite(scored, checkpoints):
    from tiny_qwen import bind_model

    low = bind_model(checkpoints[False], torch.bfloat16)
    inputs = make_prompt(low.config, "image_and_video")
    boundary = prefix_forward(low.model, inputs)
    packed = pack_responses(inputs.last_token, make_responses([2, 4]), inputs.suffix_position)
    token_logprobs(low.model, suffix_forward(low.model, [boundary], packed), packed.targets)[0].sum().backward()
    boundary.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in low.model.parameters())


def test_bad_options_are_refused(scored):
    bound, hidden, targets = scored
    with pytest.raises(BadInput, match="temperature 0"):
        token_logprobs(bound.model, hidden, targets, temperature=0.0)
    with pytest.raises(BadInput, match="chunk_tokens"):
        token_logprobs(bound.model, hidden, targets, chunk_tokens=0)


@pytest.mark.parametrize("boundary_tokens", [0, 1, 37])
def test_block_mask_means_what_the_dense_mask_means(boundary_tokens):
    """The CUDA path's mask, run by FlexAttention's eager CPU forward."""
    samples = torch.tensor([0] * 5 + [1] + [2] * 9)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(15, 4, 16, generator=generator)
    k, v = (torch.randn(boundary_tokens + 15, 2, 16, generator=generator) for _ in range(2))
    boundary, own = zip(*(x.split([boundary_tokens, 15]) for x in (k, v)))
    dense = suffix_attention(q, boundary, own, suffix_mask(boundary_tokens, samples, [5, 1, 9], torch.float32, 16))
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    block = attention.block_mask(boundary_tokens, samples, [5, 1, 9])
    flex = attention.flex_attention(*heads_first, block_mask=block, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)
