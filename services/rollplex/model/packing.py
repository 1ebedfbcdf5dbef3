"""The responses of a group, or of several, as one row of tokens.

Legend: R_i tokens of response i, T = sum of R_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from rollplex.core.errors import BadInput
from rollplex.memory.transfer import to_device


@dataclass(frozen=True)
class PackedSuffix:
    """Sample i contributes [last prompt token, y_0 .. y_{R_i - 2}], which predict y_0 .. y_{R_i - 1}."""

    token_ids: torch.Tensor
    """int64 [T]"""
    targets: torch.Tensor
    """int64 [T]"""
    sample_index: torch.Tensor
    """int64 [T], the sample's place in the list given to pack_responses; of several groups, each counts from 0"""
    positions: torch.Tensor
    """int64 [3, T]"""
    lengths: tuple[int, ...]
    """R_i of the samples present, in order."""
    group_samples: tuple[int, ...] = ()
    """Samples of each group; empty: all are of one."""

    @property
    def token_count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def to(self, device: torch.device | str) -> PackedSuffix:
        """Without waiting for it."""
        tensors = (self.token_ids, self.targets, self.sample_index, self.positions)
        return PackedSuffix(*(to_device(tensor, device) for tensor in tensors), self.lengths, self.group_samples)

    def by_group(self) -> list[PackedSuffix]:
        return self._cut(self.group_samples or (len(self.lengths),))

    def split(self, per_token: torch.Tensor) -> list[torch.Tensor]:
        """[T] -> one [R_i] a sample."""
        return list(per_token.split(self.lengths))

    def micro_batches(self, max_tokens: int) -> list[PackedSuffix]:
        """Of one group: whole samples, in order, at most `max_tokens` tokens each unless a single sample is longer."""
        runs: list[int] = []
        room = 0
        for length in self.lengths:
            if not runs or length > room:
                runs.append(0)
                room = max_tokens
            runs[-1] += 1
            room -= length
        return self._cut(runs)

    def _cut(self, sample_counts: Sequence[int]) -> list[PackedSuffix]:
        bounds = [0, *accumulate(sample_counts)]
        parts, start = [], 0
        for first, last in pairwise(bounds):
            lengths = self.lengths[first:last]
            stop = start + sum(lengths)
            rows = (self.token_ids, self.targets, self.sample_index, self.positions)
            parts.append(PackedSuffix(*(x[..., start:stop] for x in rows), lengths))
            start = stop
        return parts


def pack_responses(last_prompt_token: int, responses: Sequence[torch.Tensor], position_start: int) -> PackedSuffix:
    """Pack int64 [R_i] responses; `position_start` is the last prompt token's (PromptInputs.suffix_position)."""
    if not responses:
        raise BadInput("no responses to pack", reason="EMPTY_RESPONSE")
    lengths = tuple(len(response) for response in responses)
    if 0 in lengths:
        raise BadInput(f"response {lengths.index(0)} of {len(lengths)} is empty", reason="EMPTY_RESPONSE")
    device = responses[0].device
    first = torch.tensor([last_prompt_token], dtype=torch.int64, device=device)
    targets = torch.cat([response.to(torch.int64) for response in responses])
    tokens = torch.cat([piece for response in responses for piece in (first, response[:-1].to(torch.int64))])
    steps = torch.cat([torch.arange(length, device=device) for length in lengths])
    index = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device), output_size=sum(lengths)
    )
    return PackedSuffix(tokens, targets, index, (steps + position_start).expand(3, -1), lengths)


def pack_groups(groups: Sequence[PackedSuffix]) -> PackedSuffix:
    """Several groups' in one, for one pass over their boundaries."""
    if len(groups) == 1:
        return groups[0]
    rows = zip(*((group.token_ids, group.targets, group.sample_index, group.positions) for group in groups), strict=True)
    lengths = tuple(length for group in groups for length in group.lengths)
    return PackedSuffix(*(torch.cat(parts, dim=-1) for parts in rows), lengths, tuple(len(group.lengths) for group in groups))
