"""A tiny checkpoint with tokenizer and processor, prompts of every kind over it, and its weights outside any slab."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollplex.core import work
from rollplex.core.placement import Placement, align_up
from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor
from rollplex.memory.host_driver import sealed_memfd
from rollplex.model import (
    ActorLayout,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    load_into,
    read_model_config,
)

# isort: split
# After rollplex.model, which makes torchvision importable.
from rollplex.demo.checkpoint import VOCAB_SIZE, build_config, build_model, save_checkpoint
from rollplex.demo.prompts import corpus
from rollplex.demo.tokenizer import build_tokenizer

MEDIA = {
    "text": (),
    "image": (("image", (1, 56, 84)),),
    "video": (("video", (4, 56, 56)),),
    "mixed": (("image", (1, 56, 56)), ("video", (2, 84, 56))),
}


@contextmanager
def tensor_parallel() -> Iterator[None]:
    """A TP group of one. For what ends with a module at the latest: whoever asks next takes it away."""
    # A vLLM in this process makes groups of its own when there are none, and takes all with it when it ends.
    destroy_tensor_parallel()
    init_tensor_parallel(0, 1)
    try:
        yield
    finally:
        destroy_tensor_parallel()


def save_tiny(directory: Path, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, tied: bool = False) -> Path:
    """Biases and norms are random too, so that nothing is hidden by a zero; one token in forty ends a response."""
    tokenizer = build_tokenizer(corpus(), vocab_size)
    config = build_config(tokenizer)
    config.tie_word_embeddings = tied
    model = build_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.lm_head.weight.mul_(3)
    save_checkpoint(directory, model, tokenizer)
    generation = json.loads((directory / "generation_config.json").read_text())
    generation["eos_token_id"] += list(range(40, 50))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def frozen_model(checkpoint: Path, dtype: torch.dtype = torch.float32) -> VisionLanguageModel:
    """The checkpoint's weights in memory of their own: the oracle. Needs init_tensor_parallel."""
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, 1, str(dtype).removeprefix("torch."))
    views = layout.training_views(layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8)))
    load_into(checkpoint, config, views)
    model = VisionLanguageModel(config, dtype)
    model.bind(views)
    model.requires_grad_(False)
    return model


@dataclass
class PromptMaker:
    """Prepares groups as the coordinator does."""

    processor: PromptProcessor
    deposit: Callable[[str, int, int], object]
    """(slab name, fd, size_bytes): gives a media slab into custody."""

    def group(self, kind: str, index: int = 0, *, samples: int = 4, ordinal: int | None = None, fps: float = 2.0,
              text: str = "Which direction do the shapes move?") -> work.PreparedGroup:
        rng = np.random.default_rng(index)
        frames = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for _, shape in MEDIA[kind]]
        kinds = [name for name, _ in MEDIA[kind]]
        slab = f"runs/contract/media/{kind}/{index}-{rng.integers(1 << 60)}-{samples}-{os.urandom(4).hex()}"
        placements = self._place(slab, frames) if frames else []
        messages = [{"role": "user", "content": [*({"type": name} for name in kinds), {"type": "text", "text": text}]}]
        items = [MediaItem(name, place.offset_bytes, place.shape, fps if name == "video" else None, (), 1, None, "")
                 for name, place in zip(kinds, placements)]
        prompt = self.processor.tokenize(messages, items)
        media = tuple(work.MediaItem(name, place, fps if name == "video" else 0.0)
                      for name, place in zip(kinds, placements))
        return work.PreparedGroup(index, array("q", prompt.token_ids.tobytes()), media, prompt.prompt_hash(), samples,
                                  index if ordinal is None else ordinal)

    def _place(self, slab: str, frames: Sequence[np.ndarray]) -> list[Placement]:
        placements, end = [], 0
        for array_THW3 in frames:
            placements.append(Placement.contiguous(slab, end, array_THW3.shape, "uint8"))
            end = align_up(end + array_THW3.nbytes, 64)
        fd = sealed_memfd("media", end)
        try:
            for place, array_THW3 in zip(placements, frames):
                os.pwrite(fd, array_THW3.tobytes(), place.offset_bytes)
            self.deposit(slab, fd, end)
        finally:
            os.close(fd)
        return placements
