"""transformers' Qwen2.5-VL vision tower, driven block by block so that each can be checkpointed.

Legend: S patches in window order, W vision width, D decoder hidden, U = spatial_merge_size^2 patches a feature,
h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from rollplex.model.transfer import to_device

# transformers hands all windows over at once, with cu_seqlens, only to an implementation whose name contains "flash".
ATTENTION_NAME = "rollplex_flash_windows"

RunBlock = Callable[..., torch.Tensor]


def build_tower(config: Qwen2_5_VLVisionConfig, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The tower with meta parameters; only its rotary buffers are real."""
    AttentionInterface.register(ATTENTION_NAME, _window_attention)
    config = deepcopy(config)
    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    # Not set_attn_implementation: it takes any name with "flash" for a kernel to download.
    config._attn_implementation = ATTENTION_NAME
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
    hidden_SW = to_windows(tower.patch_embed(pixels))
    position_ids = to_device(get_vision_position_ids(grid_thw, tower.spatial_merge_size), pixels.device)
    cos_sin = tuple(to_windows(part) for part in tower.rotary_pos_emb(hidden_SW, position_ids))
    windows, frames = (_Bounds.of(bounds, pixels.device) for bounds in (window_bounds, frame_bounds))
    for index, block in enumerate(tower.blocks):
        bounds = frames if index in tower.fullatt_block_indexes else windows
        hidden_SW = run_block(
            block, hidden_SW, cu_seqlens=bounds.offsets, max_seqlen=bounds.longest, position_embeddings=cos_sin
        )
    return tower.merger(hidden_SW)[grid_order]


class _Bounds(NamedTuple):
    """Windows [offsets[i], offsets[i + 1]) of patches. The longest is known on the host, so that nothing waits for the device."""

    offsets: torch.Tensor
    """int32 on a GPU, where attention reads them; on the host otherwise."""
    longest: int

    @classmethod
    def of(cls, offsets: torch.Tensor, device: torch.device) -> _Bounds:
        longest = int(offsets.diff().max())
        return cls(to_device(offsets.to(torch.int32), device) if device.type == "cuda" else offsets, longest)


def _window_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """[1, h, S, d] -> [1, S, h, d]; attention inside each window [cu[i], cu[i+1])."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        return varlen_attn(*packed, *[cu_seq_lens_q] * 2, max_length_q, max_length_q, scale=scaling)[None], None
    # float32 on a GPU is for tests: the offsets come back to the host.
    cu_seq_lens_q = cu_seq_lens_q.cpu()
    lengths = cu_seq_lens_q.diff()
    if bool((lengths == lengths[0]).all()):
        return _equal_windows(query, key, value, int(lengths[0]), scaling), None
    starts = cu_seq_lens_q[:-1]
    rows, outputs = [], []
    for length in lengths.unique().tolist():
        index = (starts[lengths == length, None] + torch.arange(length, device=starts.device)).reshape(-1)
        rows.append(index)
        outputs.append(_equal_windows(*(x[:, :, index] for x in (query, key, value)), length, scaling))
    return torch.cat(outputs, dim=1)[:, torch.argsort(torch.cat(rows))], None


def _equal_windows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float) -> torch.Tensor:
    """[1, h, w*length, d] -> [1, w*length, h, d] with the w windows as a batch."""
    heads, size = query.shape[1], query.shape[-1]
    batch = [x[0].view(heads, -1, length, size).transpose(0, 1) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*batch, scale=scaling).transpose(1, 2).reshape(1, -1, heads, size)
