"""Prefix blocks under a limit: the same numbers, and which work is inside it. A notebook stands in for the capped stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from tiny_qwen import make_groups, two_stage_loss

from rollplex.model import HostCopies, prefix_forward


class Notebook:
    """A Limit that notes, while it is `watching`, which blocks ran inside, and whether with a graph."""

    def __init__(self, model) -> None:
        self.depth, self.entered = 0, 0
        self.inside: list[bool] = []
        """For each block that ran inside: whether autograd was on."""
        self.outside: list[bool] = []
        projections = (*(block.attn.qkv for block in model.visual.blocks), model.visual.merger.mlp[0],
                       *(layer.self_attn.k_proj for layer in model.language_model.layers))
        self._one_a_block = {id(projection.weight) for projection in projections}

    @contextmanager
    def watching(self) -> Iterator[None]:
        def noted(x, weight, *bias):
            if id(weight) in self._one_a_block:
                (self.inside if self.depth else self.outside).append(torch.is_grad_enabled())
            return linear(x, weight, *bias)

        linear, F.linear = F.linear, noted
        try:
            yield
        finally:
            F.linear = linear

    @contextmanager
    def __call__(self) -> Iterator[None]:
        assert self.depth == 0
        self.depth, self.entered = 1, self.entered + 1
        try:
            yield
        finally:
            self.depth = 0


def gradients(model) -> dict[str, torch.Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.parameters_by_name().items()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kinds", [["video"], ["text"], ["one_token"], ["image_and_video"], ["video", "image", "text"]], ids=str)
def test_neither_a_limit_nor_what_is_saved_changes_a_bit(bind, kinds, frozen):
    """Of one group, or of several in a pass."""
    bound = bind(torch.float32)
    bound.model.visual.requires_grad_(not frozen)
    groups, made = make_groups(bound.config, kinds, torch.float32, [3]), []
    for saved in ("keep", "recompute", "offload", "from_inputs"):
        for limit in (None, Notebook(bound.model)):
            loss = two_stage_loss(bound.model, groups, 0.7, (), saved=saved, limit=limit, groups_per_pass=len(groups))
            made.append((loss, gradients(bound.model)))
    (expected_loss, expected), *others = made
    assert any(gradient is not None for gradient in expected.values())
    for loss, found in others:
        assert loss == expected_loss
        for name, gradient in expected.items():
            assert found[name] is None if gradient is None else torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_only_the_forward_pass_is_inside(bind, saved):
    bound = bind(torch.float32)
    notes = Notebook(bound.model)
    (group,) = make_groups(bound.config, ["image"], torch.float32, [2])
    with notes.watching():
        boundary = prefix_forward(bound.model, group.inputs, saved, limit=notes)
    # The tower's merger is one as well.
    blocks = bound.config.layer_count + bound.config.vision.depth + 1
    assert (notes.entered, len(notes.inside), notes.outside) == (blocks, blocks, [])
    # A graph that is made inside would be gone back through inside: on the capped stream.
    assert notes.inside == [saved == "keep"] * blocks
    for k, v in boundary.leaves():
        k.grad, v.grad = torch.ones_like(k), torch.ones_like(v)
    with notes.watching():
        boundary.backward()
    assert (notes.entered, len(notes.inside)) == (blocks, blocks)
    assert any(notes.outside) == (saved != "keep")


def test_what_has_no_gradient_leaves_no_graph(bind):
    bound = bind(torch.float32)
    (group,) = make_groups(bound.config, ["image"], torch.float32, [2])
    with torch.inference_mode():
        assert not prefix_forward(bound.model, group.inputs, limit=Notebook(bound.model)).attached
    notes = Notebook(bound.model)
    bound.model.language_model.requires_grad_(False)
    (text,) = make_groups(bound.config, ["text"], torch.float32, [2])
    with notes.watching():
        assert not prefix_forward(bound.model, text.inputs, "recompute", limit=notes).attached
    assert notes.inside


def test_offloading_sees_each_blocks_input_once(bind):
    class Counting(HostCopies):
        puts = gets = 0

        def put(self, tensor):
            self.puts += 1
            return super().put(tensor)

        def get(self, handle):
            self.gets += 1
            return super().get(handle)

    bound, copies = bind(torch.float32), Counting()
    groups = make_groups(bound.config, ["image"], torch.float32, [2])
    two_stage_loss(bound.model, groups, 1.0, (), saved="offload", offload=copies, limit=Notebook(bound.model))
    assert copies.puts == copies.gets == bound.config.layer_count + bound.config.vision.depth + 1


def test_a_failing_block_leaves_the_limit(bind):
    bound = bind(torch.float32)
    notes = Notebook(bound.model)
    handle = bound.model.language_model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    (group,) = make_groups(bound.config, ["text"], torch.float32, [2])
    with pytest.raises(ZeroDivisionError):
        prefix_forward(bound.model, group.inputs, limit=notes)
    handle.remove()
    assert notes.depth == 0
