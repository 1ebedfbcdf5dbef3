"""A head that is the embedding, and a vocabulary that the layout pads: every engine reads the same slab."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rollout_rig import SAMPLING, actor_mesh, bits_of, generate, teacher_forced
from tiny_checkpoint import save_tiny

VOCAB = 371


pytestmark = pytest.mark.parametrize("engine_name", ["torch", "vllm"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["tied", "untied"])
def mesh(request, engine_name, tmp_path_factory):
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, tied=request.param == "tied")
    with actor_mesh(checkpoint, tmp_path_factory.mktemp("mesh", numbered=True)) as made:
        yield made


def test_the_layout_is_padded_and_has_one_tensor_for_a_tied_head(mesh, engine_name):
    config, layout = mesh.oracle.config, mesh.actor.layout
    assert config.vocab_size == VOCAB
    assert layout.tensors["language_model.model.embed_tokens.weight"].shape[0] == 384
    assert ("language_model.lm_head.weight" in layout.tensors) == (not config.tie_word_embeddings)


def test_samples_have_the_trainers_logprobs(mesh, bound):
    group = mesh.prompts.group("mixed", samples=4)
    outcome = generate(mesh, bound, [group])
    samples = [outcome.samples[0, index] for index in range(4)]
    for sample, expected in zip(samples, teacher_forced(mesh, group, samples, 1.0)):
        np.testing.assert_allclose(np.array(sample.logprobs), expected, atol=1e-4)
        assert max(sample.token_ids) < VOCAB


def test_a_write_to_the_embedding_changes_what_is_sampled(mesh, bound):
    result = bound.bind(mesh.actor.snapshot)
    assert result.bound_parameters == len(mesh.actor.layout.tensors)
    group = mesh.prompts.group("image", samples=1)
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    before = bits_of(generate(mesh, bound, [group], greedy))
    bound.quiesce()

    def change(views):
        views["language_model.embed_tokens.weight"][:100].neg_()

    bound.bind(mesh.actor.publish(change))
    assert bits_of(generate(mesh, bound, [group], greedy)) != before
    bound.quiesce()
    bound.bind(mesh.actor.publish(change))
    assert bits_of(generate(mesh, bound, [group], greedy)) == before
