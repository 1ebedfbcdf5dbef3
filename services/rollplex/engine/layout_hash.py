"""What engines must agree on before they share pages: the model's numbers and every tensor's place."""

from __future__ import annotations

import dataclasses

from rollplex.core.compatibility import digest
from rollplex.model import ActorLayout, ModelConfig

VISION_FIELDS = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "spatial_merge_size",
    "temporal_patch_size", "window_size", "out_hidden_size", "fullatt_block_indexes", "tokens_per_second",
)  # fmt: skip
"""Named one by one: the rest of transformers' vision config changes with its version."""


def layout_facts(config: ModelConfig, layout: ActorLayout) -> dict[str, str]:
    """By name, as text that people compare."""
    numbers = {f"config.{item.name}": getattr(config, item.name) for item in dataclasses.fields(config) if item.name != "vision"}
    numbers |= {f"config.vision.{name}": getattr(config.vision, name) for name in VISION_FIELDS}
    numbers |= {f"topology.{item.name}": getattr(layout.topology, item.name) for item in dataclasses.fields(layout.topology)}
    numbers |= {"slab.dtype": layout.dtype, "slab.size_bytes": layout.size_bytes}
    facts = {name: str(value) for name, value in numbers.items()}
    for name, tensor in layout.tensors.items():
        parts = ", ".join(f"{part.name} {part.start}:{part.stop}" for part in tensor.parts)
        facts[name] = (f"offset {tensor.offset_bytes}, {list(tensor.shape)} {tensor.dtype}"
                       f"{' transposed' if tensor.transposed else ''}, rows {parts}")
    return facts


def layout_hash(config: ModelConfig, layout: ActorLayout) -> str:
    """sha256 in hex; equal in every process that reads one slab set by the same rules."""
    return digest(layout_facts(config, layout))
