"""The responses of a group as one row of tokens.

Legend: R_i tokens of response i, T = sum of R_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """int64 [T], the sample's place in the list given to pack_responses"""
    positions: torch.Tensor
    """int64 [3, T]"""
    lengths: tuple[int, ...]
    """R_i of the samples present, in order."""

    @property
    def token_count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def to(self, device: torch.device | str) -> PackedSuffix:
        """Without waiting for it."""
        tensors = (self.token_ids, self.targets, self.sample_index, self.positions)
        return PackedSuffix(*(to_device(tensor, device) for tensor in tensors), self.lengths)

    def split(self, per_token: torch.Tensor) -> list[torch.Tensor]:
        """[T] -> one [R_i] a sample."""
        return list(per_token.split(self.lengths))

    def micro_batches(self, max_tokens: int) -> list[PackedSuffix]:
        """Whole samples, in order, at most `max_tokens` tokens each unless a single sample is longer."""
        runs: list[list[int]] = []
        room = 0
        for length in self.lengths:
            if not runs or length > room:
                runs.append([])
                room = max_tokens
            runs[-1].append(length)
            room -= length
        batches, start = [], 0
        for lengths in runs:
            stop = start + sum(lengths)
            rows = (self.token_ids, self.targets, self.sample_index, self.positions)
            batches.append(PackedSuffix(*(x[..., start:stop] for x in rows), tuple(lengths)))
            start = stop
        return batches


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
