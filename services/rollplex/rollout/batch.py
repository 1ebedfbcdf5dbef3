"""Groups that were started together: one decode state, one row a sample, one token a row and step.

Legend: B rows, R response limit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rollplex.core.work import FinishedSample
from rollplex.model import GroupDecoder, PromptInputs
from rollplex.rollout.engine import SeededGroup
from rollplex.rollout.replica import ReplicaDecoder
from rollplex.rollout.sampling import TokenSampler


class Batch:
    """`step` until `row_count` is 0; finished rows are padded until the last sample of their group has finished."""

    def __init__(self, decoder: GroupDecoder | ReplicaDecoder, sampler: TokenSampler, eos_token_ids: Sequence[int],
                 pad_token_id: int, members: Sequence[SeededGroup], inputs: Iterable[PromptInputs]) -> None:
        """`inputs` are read while the prompts are prefilled, one at a time."""
        self._decoder, self._sampler = decoder, sampler
        self._pad = pad_token_id
        limit, lengths = sampler.max_response_tokens, sampler.lengths
        self._groups = [seeded.group for seeded in members]
        counts = [group.sample_count for group in self._groups]
        self.row_count = sum(counts)
        self._group_of_B = np.repeat(np.arange(len(counts)), counts)
        self._sample_of_B = np.concatenate([np.arange(count) for count in counts])
        self._seeds_B = np.concatenate([seeded.seeds for seeded in members])
        # End tokens do not end a row whose length is prescribed.
        self._ends = np.array(eos_token_ids if lengths is None else (), dtype=np.int64)
        self._limit_B = np.array([limit if lengths is None else lengths.length(seed) for seed in self._seeds_B.tolist()])
        self._done_B = np.zeros(self.row_count, dtype=bool)
        self._tokens_BR = np.empty((self.row_count, limit), dtype=np.int64)
        self._logp_BR = np.empty((self.row_count, limit), dtype=np.float32)
        self._next_B: torch.Tensor | None = None
        self.state = decoder.start(zip(inputs, counts), limit)

    @property
    def size_bytes(self) -> int:
        """Keys and values held."""
        return self.state.size_bytes

    def step(self) -> list[FinishedSample]:
        """One token for every row; the samples that it ended. Groups that are wholly finished leave."""
        index = self.state.step
        tokens_B, logp_B = self._sampler(self._decoder.step(self.state, self._next_B), self._seeds_B, index)
        chosen_B = tokens_B.numpy()
        self._tokens_BR[:, index], self._logp_BR[:, index] = chosen_B, logp_B.numpy()
        ended_B = np.isin(chosen_B, self._ends)
        new_rows = np.flatnonzero((ended_B | (index + 1 == self._limit_B)) & ~self._done_B)
        finished = [self._sample(row, index + 1, "stop" if ended_B[row] else "length") for row in new_rows]
        self._done_B[new_rows] = True
        if len(new_rows):
            self._drop_finished_groups()
        self._next_B = torch.from_numpy(np.where(self._done_B, self._pad, self._tokens_BR[:, index]))
        return finished

    def unfinished(self) -> list[FinishedSample]:
        """What the samples that still grow have so far, where that is anything."""
        length = self.state.step
        rows = np.flatnonzero(~self._done_B) if length else ()
        return [self._sample(row, length, "aborted") for row in rows]

    def release(self) -> None:
        """Frees keys and values."""
        self.state.release()

    def _sample(self, row: int, length: int, reason: str) -> FinishedSample:
        group = self._groups[self._group_of_B[row]]
        tokens, logp = self._tokens_BR[row, :length], self._logp_BR[row, :length]
        return FinishedSample(group.group_index, int(self._sample_of_B[row]), array("q", tokens.tobytes()),
                              array("f", logp.tobytes()), reason)

    def _drop_finished_groups(self) -> None:
        kept = np.zeros(len(self._groups), dtype=bool)
        kept[self._group_of_B[~self._done_B]] = True
        if kept.all():
            return
        if not kept.any():
            self.row_count = 0
            self.release()
            return
        rows = self.state.keep_groups(kept.tolist()).numpy()
        new_number = np.cumsum(kept) - 1
        self._groups = [group for group, keep in zip(self._groups, kept) if keep]
        self._group_of_B = new_number[self._group_of_B[rows]]
        self._sample_of_B, self._seeds_B = self._sample_of_B[rows], self._seeds_B[rows]
        self._done_B, self._limit_B = self._done_B[rows], self._limit_B[rows]
        self._tokens_BR, self._logp_BR = self._tokens_BR[rows], self._logp_BR[rows]
        self.row_count = len(rows)
