"""transformers' Qwen2.5-VL vision tower: its parameters and orders, driven block by block, so that each (and the merger, which
keeps as much as six) can be checkpointed.

Legend: S patches in window order, W vision width, D decoder hidden, U = spatial_merge_size^2 patches a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from rollplex.memory.transfer import to_device
from rollplex.model.vision_block import VisionBlock, Windows, embed_patches

RunBlock = Callable[..., torch.Tensor]


def build_tower(config: Qwen2_5_VLVisionConfig, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The tower with meta parameters; only its rotary buffers are real."""
    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel(deepcopy(config))
    tower.to(dtype)
    tower.rotary_pos_emb = Qwen2_5_VLVisionRotaryEmbedding(config).to(device)
    return tower.eval()


def encode(tower: nn.Module, pixels: torch.Tensor, grid_thw: torch.Tensor, run_block: RunBlock) -> torch.Tensor:
    """pixels [S, C*T*p*p] -> features [S / U, D], both in grid order, grid on the host; `run_block(block, x, ...)` calls."""
    unit = tower.spatial_merge_unit
    window_index, window_bounds = get_vision_window_index(grid_thw, tower.spatial_merge_size, tower.window_size, tower.patch_size)
    frame_bounds = get_vision_cu_seqlens(grid_thw)

    def to_windows(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, unit, x.shape[-1])[window_index].reshape(x.shape)

    grid_order = to_device(torch.argsort(window_index), pixels.device)
    window_index = to_device(window_index, pixels.device)
    hidden_SW = to_windows(embed_patches(tower.patch_embed, pixels))
    position_ids = to_device(get_vision_position_ids(grid_thw, tower.spatial_merge_size), pixels.device)
    rope = tuple(to_windows(part) for part in tower.rotary_pos_emb(hidden_SW, position_ids))
    windows, frames = (Windows.of(bounds, pixels.device) for bounds in (window_bounds, frame_bounds))
    for index, block in enumerate(tower.blocks):
        seen = frames if index in tower.fullatt_block_indexes else windows
        hidden_SW = run_block(VisionBlock(block), hidden_SW, windows=seen, rope=rope)
    return run_block(tower.merger, hidden_SW)[grid_order]
