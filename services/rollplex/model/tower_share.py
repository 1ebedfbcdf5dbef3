"""The vision tower's work among tensor-parallel ranks, which all have its weights: each computes some time steps and gathers the
features of all. No attention of the tower leaves a time step (`cu_seqlens`, a sequence a step; windows lie inside it), and its
merger stays inside, too, so a step's features are the same in any company. Backward a rank goes through its own steps alone: the
parameters' gradients are then parts of a sum over ranks (`summed_over_ranks`).

Legend: S patches of all media, F features, D decoder hidden, n media.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from rollplex.model.vision import RunBlock, encode


@dataclass(frozen=True)
class Share:
    """Of one rank: time steps that follow each other, of one medium or several."""

    grid_thw: torch.Tensor
    """int64 [m, 3], on the host."""
    start: int
    stop: int
    """Of the S patches."""


def shares(grid_thw: torch.Tensor, ranks: int) -> list[Share]:
    """Every time step of n media [n, 3] belongs to the rank in whose part of all patches its middle lies."""
    steps, patches = grid_thw[:, 0], grid_thw[:, 1:].prod(-1)
    patches_of = patches.repeat_interleave(steps)
    medium_of = torch.arange(len(grid_thw)).repeat_interleave(steps)
    ends = patches_of.cumsum(0)
    rank_of = (2 * ends - patches_of) * ranks // (2 * ends[-1])
    found, start = [], 0
    for rank in range(ranks):
        mine = rank_of == rank
        counts = medium_of[mine].bincount(minlength=len(grid_thw))
        stop = start + int(patches_of[mine].sum())
        found.append(Share(torch.cat([counts[:, None], grid_thw[:, 1:]], dim=1)[counts > 0], start, stop))
        start = stop
    return found


def encode_shared(tower: nn.Module, pixels: torch.Tensor, grid_thw: torch.Tensor, run_block: RunBlock, group: dist.ProcessGroup
                  ) -> torch.Tensor:
    """As `encode`: pixels [S, C*T*p*p] -> features [F, D] on every rank. All ranks of the group call it alike."""
    if group.size() == 1:
        return encode(tower, pixels, grid_thw, run_block)
    parts = shares(grid_thw, group.size())
    mine = parts[group.rank()]
    if mine.stop > mine.start:
        own = encode(tower, pixels[mine.start:mine.stop], mine.grid_thw, run_block)
    else:
        # With a gradient where others have one: what comes after must be in the graph of every rank or of none.
        own = pixels.new_empty(0, tower.config.out_hidden_size)
        own.requires_grad_(torch.is_grad_enabled() and any(parameter.requires_grad for parameter in tower.parameters()))
    return _Gather.apply(own, [(part.stop - part.start) // tower.spatial_merge_unit for part in parts], group)


def summed_over_ranks(name: str) -> bool:
    """Whether ranks hold parts of the gradient of this parameter (training name), though each holds all of the parameter."""
    return name.startswith("visual.")


class _Gather(torch.autograd.Function):
    """[own F, D] of every rank, in their order. What comes after is the same on all of them, and so is its gradient."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.start, ctx.count = sum(counts[:group.rank()]), len(own)
        # NCCL wants parts of one size.
        longest = max(counts)
        padded = own.new_zeros(longest, own.shape[1])
        padded[:len(own)] = own
        gathered = own.new_empty(len(counts) * longest, own.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx, grad_FD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_FD[ctx.start:ctx.start + ctx.count], None, None
