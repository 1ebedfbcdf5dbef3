"""Prefix + packed suffix + two-stage backward against transformers' own forward of one padded row a sample."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen import (
    build_hf,
    hf_gradients,
    make_groups,
    oracle_logits,
    oracle_loss,
    two_stage_loss,
    worst_gradient_error,
)

from rollplex.model import (
    HostCopies,
    module_of,
    pack_responses,
    prefix_forward,
    suffix_forward,
    token_logprobs,
)

KINDS = {
    "text": ["text"],
    "image": ["image"],
    "two_images": ["two_images"],
    "video": ["video"],
    "mixed": ["video", "text", "image", "image_and_video", "one_token", "two_images"],
}
LENGTHS = [3, 1, 6]


def gradients(model) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.parameters_by_name().items()}


@pytest.fixture(scope="module")
def oracle():
    """(tied, batch, frozen vision) -> transformers' loss and gradients in float64, computed once."""
    cache = {}

    def compute(config, tied: bool, batch: str, frozen: bool):
        key = (tied, batch, frozen)
        if key not in cache:
            hf = build_hf(tied=tied, dtype=torch.float64)
            hf.model.visual.requires_grad_(not frozen)
            groups = make_groups(config, KINDS[batch], torch.float64, LENGTHS)
            loss = oracle_loss(hf, groups, 0.7, config.forbidden_token_ids)
            loss.backward()
            cache[key] = float(loss.detach()), hf_gradients(hf)
        return cache[key]

    return compute


def check(bound, oracle, *, tied: bool, batch: str, frozen: bool = False, **how) -> None:
    bound.model.visual.requires_grad_(not frozen)
    groups = make_groups(bound.config, KINDS[batch], torch.float64, LENGTHS)
    expected_loss, expected = oracle(bound.config, tied, batch, frozen)
    loss = two_stage_loss(bound.model, groups, 0.7, bound.config.forbidden_token_ids, **how)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    error = worst_gradient_error(gradients(bound.model), expected)
    print(f"worst relative gradient error {error:.1e}")
    assert error < 1e-10


@pytest.mark.parametrize("batch", KINDS)
def test_float64_gradients_of_every_parameter(bind, exact, oracle, batch):
    check(bind(), oracle, tied=False, batch=batch)


@pytest.mark.parametrize("saved", ["recompute", "offload", "from_inputs"])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_saved_changes_nothing(bind, exact, oracle, saved, frozen):
    check(bind(), oracle, tied=False, batch="mixed", frozen=frozen, saved=saved)


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
@pytest.mark.parametrize("groups_per_pass", [2, 4, 6])
@pytest.mark.parametrize("frozen", [False, True])
def test_who_shares_a_pass_changes_nothing(bind, exact, oracle, saved, groups_per_pass, frozen):
    check(bind(), oracle, tied=False, batch="mixed", frozen=frozen, saved=saved, groups_per_pass=groups_per_pass)


def test_frozen_vision_tower(bind, exact, oracle):
    bound = bind()
    check(bound, oracle, tied=False, batch="mixed", frozen=True)
    assert all(p.grad is None for name, p in bound.model.parameters_by_name().items() if module_of(name) != "decoder")


def test_tied_embeddings(bind, exact, oracle):
    bound = bind(tied=True)
    assert "lm_head.weight" not in bound.model.parameters_by_name()
    check(bound, oracle, tied=True, batch="mixed")


def test_micro_batches_accumulate_in_the_boundary(bind, exact, oracle):
    check(bind(), oracle, tied=False, batch="mixed", micro_batch_tokens=4)


def test_published_float32_casts_cost_no_more_than_float32(bind):
    """Without the `exact` patch: transformers casts norms and vision rotations to float32 even for float64."""
    bound = bind()
    groups = make_groups(bound.config, KINDS["mixed"], torch.float64, LENGTHS)
    hf = build_hf(tied=False, dtype=torch.float64)
    oracle_loss(hf, groups, 1.0, ()).backward()
    two_stage_loss(bound.model, groups, 1.0, ())
    assert worst_gradient_error(gradients(bound.model), hf_gradients(hf)) < 1e-5


@pytest.mark.parametrize("batch", KINDS)
def test_float32_logits_and_logprobs(bind, batch):
    bound = bind(torch.float32)
    model, config = bound.model, bound.config
    groups = make_groups(config, KINDS[batch], torch.float32, LENGTHS)
    hf = build_hf(tied=False, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle_logits(hf, groups)
        for group, samples in zip(groups, expected):
            boundary = prefix_forward(model, group.inputs)
            assert not boundary.attached
            packed = pack_responses(group.inputs.last_token, group.responses, group.inputs.suffix_position)
            hidden = suffix_forward(model, [boundary], packed)
            logits = torch.nn.functional.linear(hidden, model.head_weight)[:, : config.vocab_size]
            error = (logits - torch.cat(samples)).abs().max()
            print(f"largest logit error {error:.1e} of logits up to {logits.abs().max():.1f}")
            assert error < 2e-5 * max(1.0, float(logits.abs().max()))
            logp, entropy = token_logprobs(model, hidden, packed.targets, chunk_tokens=4, with_entropy=True)
            reference = torch.cat(samples).log_softmax(-1)
            chosen = reference.gather(-1, packed.targets[:, None])[:, 0]
            torch.testing.assert_close(logp, chosen, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1), rtol=1e-5, atol=1e-4)


class CountingCopies(HostCopies):
    def __init__(self) -> None:
        self.put_count = self.get_count = 0

    def put(self, tensor):
        self.put_count += 1
        return super().put(tensor)

    def get(self, handle):
        self.get_count += 1
        return super().get(handle)


def test_offload_moves_each_layer_input_once(bind, exact):
    bound = bind()
    copies = CountingCopies()
    groups = make_groups(bound.config, ["image"], torch.float64, [2])
    two_stage_loss(bound.model, groups, 1.0, (), saved="offload", offload=copies)
    # The tower's merger is one as well.
    layers = bound.config.layer_count + bound.config.vision.depth + 1
    assert copies.put_count == copies.get_count == layers
