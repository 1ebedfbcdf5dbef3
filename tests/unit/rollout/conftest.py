"""A decoder on a tiny checkpoint in memory of its own."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    from tiny_checkpoint import save_tiny, tensor_parallel

    from rollplex.model import ActorLayout, GroupDecoder, load_into, read_model_config

    torch.set_num_threads(1)
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, 1, "float32")
    views = layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8))
    load_into(checkpoint, config, layout.training_views(views))
    with tensor_parallel():
        yield GroupDecoder(config, layout, views)
