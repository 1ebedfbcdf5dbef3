"""A prepared group as vLLM takes it: the tokens, patches and grids that the trainer computes with, past vLLM's own processor.

That one works on the host, a third of a second for a prompt of 4096 tokens, and each version of vLLM and of transformers wants to
be told in its own way what was sampled and when. Legend: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.llm_engine import LLMEngine

from rollplex.core import work
from rollplex.core.errors import BadInput
from rollplex.engine.prompts import PromptReader, naming_group
from rollplex.model import ModelConfig, PromptInputs
from rollplex.rollout.vllm_internals import PATCH_FIELDS, engine_input
from rollplex.rollout.vllm_patches import SharedPatches

NEXT_TO_RUN = -1
"""CUDA's stream priorities: lower is sooner. A prompt's patches must not wait for the blocks of the prefill before."""


class VllmPrompts:
    """Reads a prompt once for all of its samples. Owner thread only."""

    def __init__(self, reader: PromptReader, config: ModelConfig, dtype: torch.dtype, *, shared: bool) -> None:
        """A `reader` for a GPU computes patches there, beside vLLM's steps. `dtype`: of the model. `shared`: workers of other
        processes read the patches."""
        self._reader, self._config, self._dtype = reader, config, dtype
        self._shared = SharedPatches() if shared else None
        on_gpu = reader.device.type == "cuda"
        self._stream = torch.cuda.Stream(reader.device, priority=NEXT_TO_RUN) if on_gpu else None

    def read(self, engine: LLMEngine, group: work.PreparedGroup) -> tuple[dict[str, Any], str]:
        """(vLLM's input, good until the group is forgotten; its hash). Raises as PromptReader.read does."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            inputs = self._reader.read(group)
            fields = self._fields(inputs, group.group_index)
        if self._stream is not None:
            self._stream.synchronize()
        with naming_group(group):
            numbered = fields.keys() & PATCH_FIELDS if self._shared is not None else ()
            return engine_input(engine, group.token_ids.tolist(), fields, self._media(group), numbered), inputs.hash()

    def forget(self, groups: Collection[int] | None = None) -> None:
        """By index; None: all. No request of theirs may run any more. Idempotent."""
        if self._shared is not None:
            self._shared.drop(groups)

    def _fields(self, inputs: PromptInputs, group: int) -> dict[str, torch.Tensor]:
        """By the names of the model's forward pass, in host memory: what runs vLLM's tower takes nothing else."""
        fields = {"image_grid_thw": inputs.image_grid_thw, "video_grid_thw": inputs.video_grid_thw,
                  "second_per_grid_ts": inputs.second_per_grid_ts}
        for name, pixels in zip(PATCH_FIELDS, (inputs.pixel_values_images, inputs.pixel_values_videos)):
            if pixels is not None:
                fields[name] = self._to_host(pixels.to(self._dtype), group)
        return {name: value for name, value in fields.items() if value is not None}

    def _to_host(self, patches: torch.Tensor, group: int) -> torch.Tensor:
        if self._shared is not None:
            return self._shared.put(group, patches)
        if self._stream is None:
            return patches
        # Pinned, so that vLLM's own copy back is one of the bus and not of a thread; on the device a prompt would stay for as
        # long as one of its samples decodes.
        host = torch.empty(patches.shape, dtype=self._dtype, pin_memory=True)
        return host.copy_(patches, non_blocking=True)

    def _media(self, group: work.PreparedGroup) -> dict[str, list[tuple[str, int, int]]]:
        """Kind -> (what no other medium of the mesh is called, first placeholder, placeholders) of each medium.

        Raises BadInput unless each medium has one run of placeholders.
        """
        tokens_P = np.frombuffer(group.token_ids, dtype=np.int64)
        found: dict[str, list[tuple[str, int, int]]] = {}
        for kind, token in (("image", self._config.image_token_id), ("video", self._config.video_token_id)):
            names = [f"{item.frames.slab}@{item.frames.offset_bytes}" for item in group.media if item.kind == kind]
            places = runs_of(tokens_P, token)
            if len(places) != len(names):
                raise BadInput(f"{len(names)} media of kind {kind}, and {len(places)} runs of its placeholder",
                               reason="PLACEHOLDER_COUNT")
            if names:
                found[kind] = [(name, *place) for name, place in zip(names, places)]
        return found


def runs_of(tokens_P: np.ndarray, token: int) -> Sequence[tuple[int, int]]:
    """(first, length) of every run of `token`."""
    edges = np.flatnonzero(np.diff(tokens_P == token, prepend=False, append=False))
    return [(int(first), int(end - first)) for first, end in edges.reshape(-1, 2)]
