"""The torch-free table of shapes against the layout that the model is really built from."""

from __future__ import annotations

import math
import shutil

import pytest

from rollplex.core.aliasing import AliasCase
from rollplex.core.model_layout import MEGATRON_FUSED, SPLIT, model_verdicts
from rollplex.core.placement import Placement, contiguous_strides
from rollplex.core.shapes import model_tensors, read_shapes
from rollplex.core.topology import Topology
from rollplex.model import ActorLayout, read_model_config
from rollplex.model.manifest import build_manifest
from rollplex_client.cli.published import PUBLISHED, model_shapes, published_names


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_names_shapes_and_sizes_agree(checkpoints, tied, tp):
    layout = ActorLayout.build(read_model_config(checkpoints[tied]), tp, "float32")
    verdicts = list(model_verdicts(read_shapes(checkpoints[tied]), Topology(tp, tp)))
    assert [verdict.tensor.name for verdict in verdicts] == list(layout.tensors)
    for verdict in verdicts:
        tensor = layout.tensors[verdict.tensor.name]
        assert verdict.rollout_elements * 4 == tensor.size_bytes
        assert verdict.aliasing.rollout.shape[0] == tensor.shape[0]
        assert [parameter.name for parameter in verdict.tensor.parameters] == [part.name for part in tensor.parts]
        assert [item.shape[0] for item in verdict.aliasing.training] == [part.stop - part.start for part in tensor.parts]


def matrix(place: Placement) -> Placement:
    """Convolutions are matrices to the classifier."""
    if len(place.shape) <= 2:
        return place
    assert place.strides == contiguous_strides(place.shape)
    return Placement.contiguous(place.slab, place.offset_bytes, (place.shape[0], math.prod(place.shape[1:])), place.dtype)


@pytest.mark.parametrize("train_layout", [SPLIT, MEGATRON_FUSED])
@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)], ids=str)
def test_the_manifest_is_the_classifiers_verdict(checkpoints, pair, train_layout):
    """Case, place and every piece. Only what Megatron's layout fuses may differ: that is shared with split tensors alone."""
    topology = Topology(*pair)
    layout = ActorLayout.build(read_model_config(checkpoints[False]), topology.rollout_tp, "float32", topology.train_tp)
    verdicts = list(model_verdicts(read_shapes(checkpoints[False]), topology, train_layout))
    cases = set()
    for device in range(topology.train_tp):
        entries = build_manifest(layout, device, "actor")
        assert [entry.name for entry in entries] == [verdict.tensor.name for verdict in verdicts]
        for entry, verdict in zip(entries, verdicts):
            aliasing, fused = verdict.aliasing, len(verdict.tensor.parameters) > 1
            cases.add(verdict.case)
            if verdict.case is AliasCase.INCOMPATIBLE:
                assert fused and train_layout == MEGATRON_FUSED, entry.name
                continue
            assert entry.alias_case is verdict.case, entry.name
            place = matrix(entry.placement)
            assert place == aliasing.rollout_placement("actor", place.offset_bytes, "float32"), entry.name
            if fused and train_layout == MEGATRON_FUSED:
                continue
            index = {parameter.name: at for at, parameter in enumerate(verdict.tensor.parameters)}
            for piece in entry.pieces:
                assert matrix(piece.placement) == aliasing.training_placement(
                    index[piece.name], piece.owner, "actor", place.offset_bytes, "float32"), piece
    assert (AliasCase.TRANSPOSED in cases) is (topology.q > 1)
    # One kv head a rank at q = 1: Megatron's kv group is then vLLM's [q; k; v].
    assert (AliasCase.INCOMPATIBLE in cases) is (train_layout == MEGATRON_FUSED and pair not in ((2, 2), (4, 4)))


@pytest.mark.parametrize("name", published_names())
def test_published_configs_are_read_alike_by_transformers(name, tmp_path):
    shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
    config, shapes = read_model_config(tmp_path), model_shapes(name)
    for field in ("hidden_size", "intermediate_size", "layer_count", "head_count", "kv_head_count", "vocab_size",
                  "tie_word_embeddings", "head_size"):
        assert getattr(shapes, field) == getattr(config, field), field
    for field in type(shapes.vision).__slots__:
        expected = getattr(config.vision, field)
        assert getattr(shapes.vision, field) == (tuple(expected) if isinstance(expected, list) else expected), field
    assert [shapes.padded_vocab(tp) for tp in (1, 3, 8)] == [config.padded_vocab(tp) for tp in (1, 3, 8)]
    assert (config.image_token_id, config.video_token_id, config.vision.window_size) == (151655, 151656, 112)
    layout = ActorLayout.build(config, 1, "bfloat16")
    assert [tensor.name for tensor in model_tensors(shapes)] == list(layout.tensors)
