"""Training shards nested in rollout shards, against a plain gather-and-reshard of whole parameters."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rollplex.core.aliasing import AliasCase
from rollplex.core.errors import BadInput
from rollplex.model import ActorLayout, ModelConfig, module_of, read_model_config
from rollplex.model.manifest import build_manifest, check_manifest, check_replicas, manifest_hashes

PAIRS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (4, 4)]
SHAPES = [  # heads, kv heads, head size, intermediate, hidden, vocabulary
    (4, 2, 16, 96, 64, 203), (8, 4, 8, 64, 24, 256), (4, 1, 8, 32, 40, 65), (8, 8, 4, 40, 16, 1)]  # fmt: skip


def resized(config: ModelConfig, shape: tuple[int, ...], *, tied: bool = False) -> ModelConfig:
    heads, kv_heads, size, inner, hidden, vocab = shape
    return replace(config, head_count=heads, kv_head_count=kv_heads, head_size=size, intermediate_size=inner, layer_count=1,
                   hidden_size=hidden, vocab_size=vocab, tie_word_embeddings=tied)


def _heads(rank: int, tp: int, count: int, size: int) -> torch.Tensor:
    """Rows of a rank's heads, by vLLM's rule: a share of them, or one that several ranks hold."""
    share, holders = max(1, count // tp), max(1, tp // count)
    first = rank // holders * share * size
    return torch.arange(first, first + share * size)


def reshard(config: ModelConfig, name: str, whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """The rank's part of a whole training parameter at a tensor-parallel size."""
    leaf = name.split(".")[-2]
    if module_of(name) != "decoder" or "norm" in leaf:
        return whole
    if leaf in ("q_proj", "o_proj"):
        index = _heads(rank, tp, config.head_count, config.head_size)
        return whole[:, index] if leaf == "o_proj" else whole[index]
    if leaf in ("k_proj", "v_proj"):
        return whole[_heads(rank, tp, config.kv_head_count, config.head_size)]
    return whole.chunk(tp, dim=1 if leaf == "down_proj" else 0)[rank]


def whole_parameters(layout: ActorLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shard.full_shape, generator=generator) for name, shard in layout.shards.items()}


def publish(config: ModelConfig, layout: ActorLayout, whole: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Every training rank writes its shards as the trainer does; the rollout tensors of each device, NaN where nobody wrote."""
    topology = layout.topology
    devices = [layout.views(torch.full((layout.size_bytes,), 0xFF, dtype=torch.uint8)) for _ in range(topology.train_tp)]
    for rank in range(topology.train_tp):
        part = topology.part(rank)
        peers = {topology.part(device): devices[device] for device in topology.peers(rank)}
        for name, values in whole.items():
            local = layout.stored(name, reshard(config, name, values, rank, topology.train_tp))
            for target in layout.destinations(name, part):
                view = layout.stored(name, layout.training_views(peers[target], part)[name]).view(-1)
                assert view.isnan().all(), f"{name}: written twice"
                view.copy_(local.reshape(-1))
    return devices


def check_publish(config: ModelConfig, layout: ActorLayout) -> None:
    whole, topology = whole_parameters(layout), layout.topology
    for device, views in enumerate(publish(config, layout, whole)):
        rank = topology.rollout_shard(device)
        for name, tensor in layout.tensors.items():
            parts = [reshard(config, part.name, whole[part.name], rank, topology.rollout_tp) for part in tensor.parts]
            assert torch.equal(views[name], torch.cat(parts)), name
        for name, view in layout.training_views(views, topology.part(device)).items():
            assert torch.equal(view, reshard(config, name, whole[name], device, topology.train_tp)), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_published_shards_are_what_rollout_reads(checkpoints, pair, shape, tied):
    config = resized(read_model_config(checkpoints[False]), shape, tied=tied)
    check_publish(config, ActorLayout.build(config, pair[1], "float32", pair[0]))


@pytest.mark.parametrize("seed", range(25))
def test_random_models_publish_what_rollout_reads(checkpoints, seed):
    rng = random.Random(seed)
    rollout_tp, q = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4])
    train_tp = rollout_tp * q
    kv_heads = rng.choice([n for n in range(1, 25) if all(n % tp == 0 or tp % n == 0 for tp in (train_tp, rollout_tp))])
    heads = train_tp * kv_heads * rng.randint(1, 2)
    shape = (heads, kv_heads, rng.choice([2, 4, 6]), train_tp * rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 300))
    config = resized(read_model_config(checkpoints[False]), shape, tied=rng.random() < 0.5)
    check_publish(config, ActorLayout.build(config, rollout_tp, "float32", train_tp))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_parts_lie_in_the_slab_disjoint_and_cover_it(checkpoints, pair):
    config = read_model_config(checkpoints[False])
    layout = ActorLayout.build(config, pair[1], "bfloat16", pair[0])
    owners = torch.zeros(layout.size_bytes, dtype=torch.int32)
    slab = torch.arange(layout.size_bytes // 2, dtype=torch.int16).view(torch.uint8)
    for name, place in layout.placements("").items():
        assert place.offset_bytes >= 0 and place.end_bytes <= layout.size_bytes, name
    for part in range(layout.topology.q):
        views = layout.training_views(layout.views(slab), part)
        for name, place in layout.training_placements("", part).items():
            view = views[name]
            assert (view.shape, view.stride()) == (place.shape, place.strides), name
            assert view.data_ptr() - slab.data_ptr() == place.offset_bytes and place.end_bytes <= layout.size_bytes
            assert layout.stored(name, view).is_contiguous(), name
            if 0 in layout.destinations(name, part):
                owners[place.offset_bytes : place.offset_bytes + place.size_bytes] += 1
    assert int(owners.max()) == 1
    assert int(owners.sum()) == sum(tensor.size_bytes for tensor in layout.tensors.values())


def test_row_parallel_weights_are_transposed_only_when_ranks_share_a_shard(checkpoints):
    config = read_model_config(checkpoints[False])
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    alike, nested = ActorLayout.build(config, 2, "float32", 2), ActorLayout.build(config, 1, "float32", 2)
    assert alike.placements("")[name].strides == (48, 1)
    assert (nested.placements("")[name].shape, nested.placements("")[name].strides) == ((64, 96), (1, 64))


def test_what_does_not_divide_is_refused_with_the_numbers(checkpoints):
    config = read_model_config(checkpoints[False])
    with pytest.raises(BadInput, match="training at TP 3 and rollout at TP 2"):
        ActorLayout.build(config, 2, "float32", 3)
    with pytest.raises(BadInput, match="4 attention heads are not divisible by a tensor-parallel size of 8"):
        ActorLayout.build(config, 4, "float32", 8)
    with pytest.raises(BadInput, match="97 intermediate size"):
        ActorLayout.build(replace(config, intermediate_size=97), 1, "float32", 2)
    with pytest.raises(BadInput, match="3 kv heads and a tensor-parallel size of 2"):
        ActorLayout.build(replace(config, head_count=6, kv_head_count=3), 1, "float32", 2)
    with pytest.raises(BadInput, match="part 2 of a rollout shard with 2"):
        ActorLayout.build(config, 1, "float32", 2).training_placements("", 2)
    with pytest.raises(BadInput, match="size 3 on a layout of TP_train 4 and TP_rollout 2"):
        ActorLayout.build(config, 2, "float32", 4).shards_at(3)


def test_vocabulary_padding_is_one_on_both_sides(checkpoints):
    config = replace(read_model_config(checkpoints[False]), head_count=6, kv_head_count=2, vocab_size=203)
    layout = ActorLayout.build(config, 2, "float32", 6)
    assert layout.shards["lm_head.weight"].full_shape[0] == layout.rollout_shards["lm_head.weight"].full_shape[0] == 384


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_manifest_is_complete_and_says_who_writes(checkpoints, pair):
    layout = ActorLayout.build(read_model_config(checkpoints[False]), pair[1], "float32", pair[0])
    for device in range(pair[0]):
        entries = build_manifest(layout, device, "actor")
        check_manifest(entries, layout.tensors)
        by_name = {entry.name: entry for entry in entries}
        down = by_name["language_model.model.layers.0.mlp.down_proj.weight"]
        assert (down.alias_case is AliasCase.TRANSPOSED) == (layout.topology.q > 1)
        assert [piece.owner for piece in down.pieces] == list(layout.topology.peers(device))
        assert [piece.owner for piece in by_name["language_model.model.norm.weight"].pieces] == [device]
    with pytest.raises(BadInput, match="engine has 1"):
        check_manifest(entries, ["one"])


def test_hashes_tell_devices_apart(checkpoints):
    config = read_model_config(checkpoints[False])
    layout = ActorLayout.build(config, 1, "float32", 2)
    devices = publish(config, layout, whole_parameters(layout))
    hashes = [manifest_hashes(views) for views in devices]
    check_replicas(layout, hashes)
    devices[1]["language_model.model.layers.0.self_attn.o_proj.weight"][0, 0] += 1
    with pytest.raises(Exception, match="1 tensors on device 1 differ from those of device 0: .*o_proj"):
        check_replicas(layout, [hashes[0], manifest_hashes(devices[1])])
