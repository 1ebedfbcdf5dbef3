"""The torch-free table of shapes against the layout that the model is really built from."""

from __future__ import annotations

import shutil

import pytest

from rollplex.core.model_layout import model_verdicts
from rollplex.core.shapes import model_tensors, read_shapes
from rollplex.core.topology import Topology
from rollplex.model import ActorLayout, read_model_config
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


@pytest.mark.parametrize("name", published_names())
def test_published_configs_are_read_alike_by_transformers(name, tmp_path):
    shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
    config, shapes = read_model_config(tmp_path), model_shapes(name)
    for field in ("hidden_size", "intermediate_size", "layer_count", "head_count", "kv_head_count", "vocab_size",
                  "tie_word_embeddings", "head_size"):
        assert getattr(shapes, field) == getattr(config, field), field
    for field in type(shapes.vision).__slots__:
        assert getattr(shapes.vision, field) == getattr(config.vision, field), field
    assert [shapes.padded_vocab(tp) for tp in (1, 3, 8)] == [config.padded_vocab(tp) for tp in (1, 3, 8)]
    assert (config.image_token_id, config.video_token_id, config.vision.window_size) == (151655, 151656, 112)
    layout = ActorLayout.build(config, 1, "bfloat16")
    assert [tensor.name for tensor in model_tensors(shapes)] == list(layout.tensors)
