"""Attention of the decoder: causal over a prompt, and of packed suffixes over [boundary; suffixes].

CUDA takes two passes of FlashAttention (flash_suffix), or FlexAttention with a block mask for dtypes and head sizes that those
do not take; CPU takes SDPA with a dense mask: FlexAttention has no backward there. No key or value is repeated, neither per
sample nor per query head (CPU: a stride-0 axis; FlexAttention: enable_gqa).
Legend: T queries, S keys = boundary tokens + T, H query heads, K kv heads, G = H / K, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rollplex.memory.transfer import to_device
from rollplex.model.flash_suffix import Samples, flash_suffix_attention, supports
from rollplex.model.packing import PackedSuffix
from rollplex.model.suffix_blocks import TILE, ordered, suffix_tiles


@dataclass(frozen=True)
class Apart:
    """One group after the other."""

    groups: tuple[Seen, ...]
    token_counts: tuple[int, ...]
    """T of each."""


Seen = torch.Tensor | BlockMask | Samples | Apart
"""Who sees whom, in the form that the way of computing wants."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""(k, v) [tokens, K, d] each."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [T, H, d], k, v [T, K, d] -> [T, H, d]."""
_ONE_KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}
"""Fewer than 128 queries would go to a kernel for decoding, which is not there for all dtypes, head counts and lengths."""


def causal_attention(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
    """-> [T, H, d]"""
    if q_THd.is_cuda:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_TKd, v_TKd))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return _grouped(q_THd, k_TKd, v_TKd, is_causal=True)


def causal_over(token_counts: Sequence[int]) -> Attend:
    """Of prompts in a row, each by itself."""
    if len(token_counts) == 1:
        return causal_attention

    def attend(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        # A call for each: the kernel that a prompt alone goes through.
        prompts = zip(*(x.split(list(token_counts)) for x in (q_THd, k_TKd, v_TKd)), strict=True)
        return torch.cat([causal_attention(*prompt) for prompt in prompts])

    return attend


def suffix_mask(
    boundary_tokens: int, sample_index_T: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype, head_size: int
) -> Seen:
    """All of the boundary, and causally the own sample. On a CPU additive, [T, S].

    `lengths`: of the samples in `sample_index_T`, known on the host.
    """
    if sample_index_T.is_cuda and supports(dtype, head_size):
        return Samples.of([boundary_tokens], [lengths], sample_index_T.device)
    if sample_index_T.is_cuda:
        return block_mask(boundary_tokens, sample_index_T, lengths)
    count = sample_index_T.shape[0]
    own = (sample_index_T[:, None] == sample_index_T[None, :]).tril()
    mask_TS = torch.zeros(count, boundary_tokens + count, dtype=dtype, device=sample_index_T.device)
    mask_TS[:, boundary_tokens:].masked_fill_(~own, -torch.inf)
    return mask_TS


def packed_mask(boundary_tokens: Sequence[int], packed: PackedSuffix, dtype: torch.dtype, head_size: int) -> Seen:
    """The same of groups that are packed together, each over its own boundary."""
    groups = packed.by_group()
    if len(groups) > 1 and packed.sample_index.is_cuda and supports(dtype, head_size) and all(boundary_tokens):
        return Samples.of(boundary_tokens, [group.lengths for group in groups], packed.device)
    masks = tuple(suffix_mask(count, group.sample_index, group.lengths, dtype, head_size)
                  for count, group in zip(boundary_tokens, groups, strict=True))
    return masks[0] if len(masks) == 1 else Apart(masks, tuple(group.token_count for group in groups))


def packed_attention(q_THd: torch.Tensor, boundaries: Sequence[Pair], own: Pair, seen: Seen) -> torch.Tensor:
    """-> [T, H, d], of the groups whose boundaries these are, in order."""
    if isinstance(seen, Apart):
        parts = (x.split(seen.token_counts) for x in (q_THd, *own))
        return torch.cat([suffix_attention(q, boundary, (k, v), mask)
                          for q, k, v, boundary, mask in zip(*parts, boundaries, seen.groups, strict=True)])
    if len(boundaries) == 1:
        return suffix_attention(q_THd, boundaries[0], own, seen)
    k_BKd, v_BKd = (torch.cat(tensors) for tensors in zip(*boundaries, strict=True))
    return suffix_attention(q_THd, (k_BKd, v_BKd), own, seen)


def suffix_attention(q_THd: torch.Tensor, boundary: Pair, own: Pair, seen: Seen) -> torch.Tensor:
    """-> [T, H, d], of one group, or of several that `seen` tells apart."""
    if isinstance(seen, Samples):
        return flash_suffix_attention(q_THd, boundary, own, seen)
    k_SKd, v_SKd = (torch.cat(pair) for pair in zip(boundary, own, strict=True))
    if isinstance(seen, BlockMask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_SKd, v_SKd))
        return _compiled_flex()(q, k, v, block_mask=seen, enable_gqa=True, kernel_options=_ONE_KERNEL)[0].transpose(0, 1)
    return _grouped(q_THd, k_SKd, v_SKd, attn_mask=seen)


def _grouped(q_THd: torch.Tensor, k_SKd: torch.Tensor, v_SKd: torch.Tensor, **how: object) -> torch.Tensor:
    """kv heads as the batch, the G query heads that share one as heads."""
    count, heads, size = q_THd.shape
    kv_heads = k_SKd.shape[1]
    q_KGTd = q_THd.view(count, kv_heads, -1, size).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(-1, q_KGTd.shape[1], -1, -1) for x in (k_SKd, v_SKd))
    out_KGTd = F.scaled_dot_product_attention(q_KGTd, k, v, **how)
    return out_KGTd.permute(2, 0, 1, 3).reshape(count, heads, size)


def block_mask(boundary_tokens: int, sample_index_T: torch.Tensor, lengths: Sequence[int]) -> BlockMask:
    """The same from tiles: no mask of size [T, S] exists, and the host waits for nothing."""
    tiles, device = suffix_tiles(boundary_tokens, lengths), sample_index_T.device
    # As a tensor: an int in the closure would be compiled in, and every prompt length would compile again.
    boundary = to_device(torch.tensor(boundary_tokens), device)

    def visible(batch, head, query, key):
        own = key - boundary
        same = sample_index_T[own.clamp(min=0)] == sample_index_T[query]
        return (own < 0) | (same & (own <= query))

    listed = [to_device(torch.from_numpy(part[None, None]), device)
              for which in (tiles.partial, tiles.full) for part in ordered(which)]
    count = sample_index_T.shape[0]
    return BlockMask.from_kv_blocks(
        *listed, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(count, boundary_tokens + count)
    )


@cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=True)
