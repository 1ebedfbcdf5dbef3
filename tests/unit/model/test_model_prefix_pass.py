"""Several prompts through one prefix: each as by itself, and one way back for all of them. Their gradients are held to those of
transformers in test_model_exactness.py."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny_qwen import make_prompt, make_responses, worst_gradient_error
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.core.errors import WrongState
from rollplex.model import pack_groups, pack_responses, prefix, prefix_forward, prefix_pass, suffix_forward

KINDS = ["video", "text", "image", "one_token", "image_and_video", "two_images"]
LENGTHS = [3, 1]


def summed(model, boundaries, prompts) -> torch.Tensor:
    """A loss over the suffixes of these prompts, in one pass."""
    packed = pack_groups([pack_responses(inputs.last_token, make_responses(LENGTHS, seed), inputs.suffix_position)
                          for seed, inputs in enumerate(prompts)])
    hidden = suffix_forward(model, boundaries, packed)
    weights = torch.linspace(-1, 2, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)
    return (hidden * weights).sum()


def gradients(model) -> dict[str, torch.Tensor | None]:
    found = {name: parameter.grad for name, parameter in model.parameters_by_name().items()}
    model.zero_grad(set_to_none=True)
    return found


def test_boundaries_are_those_of_each_prompt_alone(bind):
    bound = bind()
    prompts = [make_prompt(bound.config, kind) for kind in KINDS]
    with torch.no_grad():
        alone = [prefix_forward(bound.model, inputs) for inputs in prompts]
        together = prefix_pass(bound.model, prompts)
    assert together.size_bytes == sum(x.nbytes for boundary in alone for pair in boundary.layers for x in pair)
    for one, other, inputs in zip(together.boundaries, alone, prompts, strict=True):
        assert one.token_count == inputs.token_count - 1
        for pair, expected in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(pair, expected, rtol=0, atol=1e-12)


def test_no_prompt_sees_another(bind):
    """Whatever stands beside it."""
    bound = bind()
    first, *others = (make_prompt(bound.config, kind) for kind in ("image", "video", "text"))
    with torch.no_grad():
        found = [prefix_pass(bound.model, [other, first]).boundaries[1].layers for other in others]
    for pair, same in zip(*found, strict=True):
        torch.testing.assert_close(pair, same, rtol=0, atol=1e-12)


@pytest.mark.parametrize("trained", [[0], [1], [0, 2]])
def test_a_prompt_without_gradient_adds_none(bind, exact, trained):
    """Groups that are left out of training went through the prefix with others."""
    bound = bind()
    prompts = [make_prompt(bound.config, kind) for kind in ("image", "text", "video")]
    some = [prompts[index] for index in trained]
    alone = [prefix_forward(bound.model, inputs, "keep") for inputs in some]
    summed(bound.model, alone, some).backward()
    for boundary in alone:
        boundary.backward()
    expected = gradients(bound.model)
    together = prefix_pass(bound.model, prompts, "keep")
    summed(bound.model, [together.boundaries[index] for index in trained], some).backward()
    together.backward()
    found = gradients(bound.model)
    # The tower of a medium that is left out got zeros, where alone it got nothing.
    found = {name: None if value is not None and expected[name] is None and not value.any() else value
             for name, value in found.items()}
    assert worst_gradient_error(found, expected, len(bound.model.head_weight)) < 1e-12


def test_life(bind):
    bound = bind()
    prompts = [make_prompt(bound.config, kind) for kind in ("image", "text")]
    together = prefix_pass(bound.model, prompts)
    together.backward()
    assert together.attached, "no suffix has taken anything: the way back is still there"
    summed(bound.model, together.boundaries, prompts).backward()
    together.boundaries[1].backward()
    assert not any(boundary.attached for boundary in together.boundaries), "one way back for all"
    together.boundaries[0].release()
    for boundary in together.boundaries:
        with pytest.raises(WrongState, match="released"):
            boundary.leaves()
    with torch.no_grad():
        assert not prefix_pass(bound.model, prompts).attached


@pytest.mark.parametrize("saved", ["keep", "recompute", "from_inputs"])
def test_what_is_dropped_is_gone_at_once(bind, saved):
    """Without Python's collector, which runs when it likes."""
    bound = bind()
    prompts = [make_prompt(bound.config, kind) for kind in ("image", "text")]
    gc.disable()
    try:
        boundary = prefix_pass(bound.model, prompts, saved).boundaries[0]
        keys = weakref.ref(boundary.layers[0][0])
        assert keys() is not None
        del boundary
        assert keys() is None
    finally:
        gc.enable()


def test_what_runs_again_finds_the_first_keys_and_values_gone(bind, monkeypatch):
    bound = bind()
    prompts = [make_prompt(bound.config, kind) for kind in ("image", "text")]
    together = prefix_pass(bound.model, prompts, "from_inputs")
    first, attend, there = weakref.ref(together.boundaries[0].layers[0][0]), prefix.causal_over, []
    summed(bound.model, together.boundaries, prompts).backward()

    def watched(token_counts):
        there.append(first() is not None)
        return attend(token_counts)

    monkeypatch.setattr(prefix, "causal_over", watched)
    together.backward()
    assert there == [False]


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved", ["keep", "recompute", "from_inputs"])
def test_four_prompts_are_little_more_to_launch_than_one(bind, saved):
    """What a pass of several is for. Attention and what joins its outputs is all that there is for each."""
    bound = bind()
    prompt = make_prompt(bound.config, "video")
    counted = []
    for prompts in ([prompt], [prompt] * 4):
        with Operations() as forward:
            together = prefix_pass(bound.model, prompts, saved)
        summed(bound.model, together.boundaries, prompts).backward()
        with Operations() as backward:
            together.backward()
        counted.append((forward.count, backward.count))
    for one, four in zip(*counted, strict=True):
        # 1.2 to 1.44 times as many, as counted; a pass each would be four times as many.
        assert four < 2 * one, counted


def test_prompts_of_one_token_have_empty_boundaries(bind):
    bound = bind()
    prompts = [make_prompt(bound.config, "one_token") for _ in range(2)]
    together = prefix_pass(bound.model, prompts)
    assert not together.attached and [boundary.token_count for boundary in together.boundaries] == [0, 0]
    summed(bound.model, together.boundaries, prompts).backward()
    assert bound.model.language_model.layers[0].self_attn.q_proj.weight.grad.any()
