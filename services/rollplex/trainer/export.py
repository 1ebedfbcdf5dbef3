"""The bound snapshot as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rollplex.model import Ranks, VisionLanguageModel, save_checkpoint


def write(source: Path, path: Path, model: VisionLanguageModel, ranks: Ranks, views: Mapping[str, torch.Tensor]) -> int:
    """Writes `path`, whole or not at all, and returns its bytes; 0 on ranks that do not write. The first replica does.

    `views`: what the model binds. `source` gives configuration, tokenizer and processor files. Raises BadInput when `path` exists
    and is not an empty directory.
    """
    if ranks.replica:
        return 0

    def gather(name: str, local: torch.Tensor) -> Sequence[torch.Tensor] | None:
        # NCCL moves bytes in order, whatever a tensor's strides say, and gets no mapped slab: a copy, contiguous.
        local = local.clone(memory_format=torch.contiguous_format)
        parts = [torch.empty_like(local) for _ in range(model.tp_size)] if model.tp_rank == 0 else None
        dist.gather(local, parts, group=model.group, group_dst=0)
        return parts

    save_checkpoint(source, path, model.config, views, gather=gather if model.tp_size > 1 else None,
                    shards=model.shards)
    if model.tp_rank:
        return 0
    return sum(file.stat().st_size for file in path.iterdir())
