"""One hash over what engines must agree on before they share pages: the model's numbers and every tensor's place."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from rollplex.model import ActorLayout, ModelConfig

VISION_FIELDS = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "spatial_merge_size",
    "temporal_patch_size", "window_size", "out_hidden_size", "fullatt_block_indexes", "tokens_per_second",
)  # fmt: skip
"""Named one by one: the rest of transformers' vision config changes with its version."""


def layout_hash(config: ModelConfig, layout: ActorLayout) -> str:
    """sha256 in hex; equal in every process that reads one slab set by the same rules."""
    numbers = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name != "vision"}
    vision = {name: getattr(config.vision, name) for name in VISION_FIELDS}
    tensors = [[name, dataclasses.astuple(tensor)] for name, tensor in layout.tensors.items()]
    topology = dataclasses.astuple(layout.topology)
    whole = [numbers, vision, topology, layout.dtype, layout.size_bytes, tensors]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
