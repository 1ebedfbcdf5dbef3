"""What is compiled at its first use (`fused`, FlexAttention), compiled before that: an engine has nothing to do while the slowest
one of its mesh starts, and the first iteration would wait for it, 12 to 50 s on an H200."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rollplex.core.topology import is_cuda, torch_device
from rollplex.model.config import ModelConfig, read_model_config
from rollplex.model.inputs import PromptInputs
from rollplex.model.layout import ActorLayout
from rollplex.model.logprobs import token_logprobs
from rollplex.model.network import VisionLanguageModel
from rollplex.model.packing import PackedSuffix, pack_responses
from rollplex.model.prefix import prefix_forward
from rollplex.model.suffix import suffix_forward

log = logging.getLogger(__name__)
_GRID = (8, 32, 32)
"""Of the video: kernels are laid out for the sizes that they first see, so these are a job's, as are all widths."""
_RESPONSES = (128,) * 4
_MEDIA_IDS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
_TEXT = 5
_VOCABULARY = 64


def warm_up(checkpoint: Path, dtype: str, device: str, stopped: Callable[[], bool], *, trains: bool, ranks: int = 1
            ) -> None:
    """`device`: Topology.device_name; only for a GPU, on the thread that will compute. `trains`: backward, too. `ranks`: the
    tensor-parallel size. Ends early once `stopped`. Takes memory for two layers meanwhile. What fails is told and left for the
    first use."""
    if not is_cuda(device):
        return
    began = time.monotonic()
    try:
        config = one_rank(read_model_config(checkpoint), ranks)
        for _ in rehearse(config, getattr(torch, dtype), torch.device(torch_device(device)), trains=trains):
            if stopped():
                break
        else:
            log.info("kernels compiled in %.1f s", time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - nobody waits for this call, and what it raised would be lost
        log.warning("kernels will be compiled at their first use: %s: %s", type(error).__name__, error, exc_info=error)
    torch.cuda.empty_cache()


def rehearse(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, trains: bool) -> Iterator[str]:
    """One video prompt and its responses through two layers of the real widths: the name of each step that is done."""
    small = two_layers(config)
    layout = ActorLayout.build(small, 1, str(dtype).removeprefix("torch."))
    model = VisionLanguageModel(small, dtype, device, layout=layout)
    model.bind(layout.training_views(layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device))))
    # As the reference's: what is compiled for weights that take a gradient is not used for those that do not, in any mode.
    model.requires_grad_(trains)
    inputs, packed = _prompt(small, device)
    if not trains:
        # No mode may last over a yield: it would be the caller's.
        with torch.inference_mode():
            boundary = prefix_forward(model, inputs)
        yield "prefix"
        with torch.inference_mode():
            token_logprobs(model, suffix_forward(model, [boundary], packed), packed.targets)
        yield "score"
        return
    # Without a graph and with one: all that any saved mode compiles.
    boundary = prefix_forward(model, inputs, "from_inputs")
    yield "prefix"
    logprobs, _ = token_logprobs(model, suffix_forward(model, [boundary], packed, "keep"), packed.targets, with_entropy=True)
    yield "suffix"
    logprobs.sum().backward()
    yield "suffix backward"
    boundary.backward()
    yield "prefix backward"


def one_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """A model as wide as one rank's share: kernels for a single kv head are others than for several."""
    return replace(config, head_count=config.head_count // ranks, kv_head_count=max(1, config.kv_head_count // ranks),
                   intermediate_size=config.intermediate_size // ranks)


def two_layers(config: ModelConfig) -> ModelConfig:
    """Of the decoder, whose last one ends at its keys and values, and of the tower: windows and whole frames."""
    vision = deepcopy(config.vision)
    vision.depth, vision.fullatt_block_indexes = 2, [1]
    return replace(config, layer_count=2, vocab_size=_VOCABULARY, vision=vision, eos_token_ids=(_TEXT,), pad_token_id=None,
                   **_MEDIA_IDS)


def _prompt(config: ModelConfig, device: torch.device) -> tuple[PromptInputs, PackedSuffix]:
    frames, height, width = _GRID
    features = frames * height * width // config.spatial_merge_size**2
    tokens = np.array([_TEXT, config.vision_start_token_id, *[config.video_token_id] * features, config.vision_end_token_id,
                       _TEXT, _TEXT])
    inputs = PromptInputs.from_arrays(
        config, token_ids=tokens,
        pixel_values_videos=np.zeros((frames * height * width, config.patch_width), dtype=np.float32),
        video_grid_thw=np.array([_GRID]), second_per_grid_ts=np.ones(1)).to(device)
    responses = [torch.full((length,), _TEXT, device=device) for length in _RESPONSES]
    return inputs, pack_responses(inputs.last_token, responses, inputs.suffix_position)
