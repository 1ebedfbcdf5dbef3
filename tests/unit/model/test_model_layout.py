"""One slab, two sets of names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollplex.core.errors import BadInput
from rollplex.model import ActorLayout, VisionLanguageModel, module_of, read_model_config


@pytest.fixture(params=[(False, 1), (True, 1), (False, 2), (True, 2), (False, 4)])
def layout(request, checkpoints) -> ActorLayout:
    tied, tp = request.param
    return ActorLayout.build(read_model_config(checkpoints[tied]), tp, "bfloat16")


def test_training_placements_tile_their_rollout_tensor(layout):
    rollout, training = layout.placements("actor"), layout.training_placements("actor")
    assert training.keys() == layout.shards.keys()
    by_owner: dict[str, list] = {name: [] for name in rollout}
    for name, placement in training.items():
        assert placement.shape == layout.shards[name].shape
        by_owner[layout.rollout_name_of[name]].append(placement)
    for name, parts in by_owner.items():
        cursor = rollout[name].offset_bytes
        for part in parts:
            assert part.slab == "actor" and part.offset_bytes == cursor
            cursor = part.end_bytes
        assert cursor == rollout[name].end_bytes


def test_tensors_are_aligned_disjoint_and_fill_the_slab(layout):
    end = 0
    for tensor in layout.tensors.values():
        assert tensor.offset_bytes % 256 == 0 and 0 <= tensor.offset_bytes - end < 256
        end = tensor.offset_bytes + tensor.size_bytes
    assert 0 <= layout.size_bytes - end < 256


def test_names_are_vllms_and_transformers(checkpoints):
    layout = ActorLayout.build(read_model_config(checkpoints[False]), 1, "bfloat16")
    qkv = layout.tensors["language_model.model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.shape == (64 + 32 + 32, 64)
    assert [(part.name.rpartition("self_attn.")[2], part.start, part.stop) for part in qkv.parts] == [
        ("q_proj.weight", 0, 64),
        ("k_proj.weight", 64, 96),
        ("v_proj.weight", 96, 128),
    ]
    assert layout.tensors["visual.blocks.0.mlp.gate_up_proj.bias"].shape == (96,)
    assert layout.tensors["language_model.lm_head.weight"].shape == (256, 64)
    assert "visual.blocks.2.mlp.up_proj.weight" in layout.shards


def test_tied_embeddings_have_no_head(checkpoints):
    layout = ActorLayout.build(read_model_config(checkpoints[True]), 1, "bfloat16")
    assert not any("lm_head" in name for name in (*layout.tensors, *layout.shards))


def test_shards_come_apart_and_together(checkpoints):
    layout = ActorLayout.build(read_model_config(checkpoints[False]), 4, "float32")
    for shard in layout.shards.values():
        whole = torch.randn(shard.full_shape)
        parts = [shard.take(whole, rank) for rank in range(4)]
        assert all(part.shape == shard.shape for part in parts)
        assert torch.equal(shard.merge(parts), whole)
    kv = layout.shards["language_model.layers.0.self_attn.k_proj.weight"]
    assert [kv.bounds(rank) for rank in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_every_parameter_belongs_to_a_module(layout):
    kinds = {name: module_of(name) for name in (*layout.tensors, *layout.shards)}
    assert {kinds["visual.merger.mlp.0.weight"], kinds["visual.merger.ln_q.weight"]} == {"projector"}
    assert kinds["visual.patch_embed.proj.weight"] == "vision"
    assert kinds["language_model.norm.weight"] == kinds["language_model.model.norm.weight"] == "decoder"


def test_indivisible_sizes_are_refused(checkpoints):
    config = read_model_config(checkpoints[False])
    with pytest.raises(BadInput, match="4 attention heads"):
        ActorLayout.build(config, 3, "float32")
    with pytest.raises(BadInput, match="intermediate"):
        ActorLayout.build(replace(config, intermediate_size=97), 2, "float32")
    with pytest.raises(BadInput, match="float16"):
        ActorLayout.build(config, 1, "float16")


def test_padded_vocabulary(checkpoints):
    config = read_model_config(checkpoints[False])
    assert config.vocab_size == 203
    assert [config.padded_vocab(tp) for tp in (1, 2, 4)] == [256, 256, 256]
    assert replace(config, vocab_size=256).padded_vocab(1) == 256
    assert replace(config, vocab_size=257).padded_vocab(3) == 384


def test_bind_checks_the_set(bind):
    bound = bind()
    views = bound.layout.training_views(bound.rollout_views)
    missing = {name: view for name, view in views.items() if name != "language_model.norm.weight"}
    with pytest.raises(BadInput, match="no view for language_model.norm.weight"):
        bound.model.bind(missing)
    with pytest.raises(BadInput, match="unknown views extra"):
        bound.model.bind({**views, "extra": torch.zeros(1)})
    with pytest.raises(BadInput, match=r"language_model.norm.weight is torch.float64 \(63,\); expected torch.float64 \(64,\)"):
        bound.model.bind({**views, "language_model.norm.weight": torch.zeros(63, dtype=torch.float64)})
    with pytest.raises(BadInput, match="torch.float32"):
        bound.model.bind({**views, "language_model.norm.weight": torch.zeros(64)})


def test_binding_allocates_and_copies_nothing(bind):
    bound = bind()
    fresh = VisionLanguageModel(bound.config, torch.float64)
    assert all(parameter.is_meta for parameter in fresh.parameters())
    views = bound.layout.training_views(bound.rollout_views)
    fresh.bind(views)
    parameters = fresh.parameters_by_name()
    assert all(parameters[name].data_ptr() == view.data_ptr() for name, view in views.items())
    kept = parameters["language_model.norm.weight"]
    fresh.bind({name: view.clone() for name, view in views.items()})
    assert fresh.parameters_by_name()["language_model.norm.weight"] is kept
    assert kept.data_ptr() != views["language_model.norm.weight"].data_ptr()
