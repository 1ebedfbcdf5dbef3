"""Samples in flight inside vLLM: one request each, so that every one streams, stops and is seeded by itself."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from rollplex.core import work
from rollplex.core.errors import BadInput, InternalError
from rollplex.rollout.engine import SeededGroup
from rollplex.rollout.sampling import check_sampling
from rollplex.rollout.vllm_internals import Requests

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one when it is given a lower one."""


@dataclass
class Growing:
    """One sample's tokens so far."""

    group_index: int
    sample_index: int
    tokens: array = field(default_factory=lambda: array("q"))
    logprobs: array = field(default_factory=lambda: array("f"))

    def finished(self, reason: str) -> work.FinishedSample:
        return work.FinishedSample(self.group_index, self.sample_index, self.tokens, self.logprobs, reason)


class Flight:
    """`add` groups, `step` while it is not empty, `abort` at the end."""

    _numbers = itertools.count()

    def __init__(self, requests: Requests, sampling: work.Sampling, stop_token_ids: Sequence[int],
                 forbidden_token_ids: Sequence[int], *, sample_generators: bool = True) -> None:
        """`sample_generators`: VllmSection's. Raises BadInput for a sampling that vLLM would change."""
        check_sampling(sampling)
        if not sampling.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise BadInput(f"temperature is {sampling.temperature}; vLLM samples at {LEAST_TEMPERATURE} or above",
                           reason="BAD_SAMPLING")
        self._requests, self._sampling = requests, sampling
        self._lengths = sampling.lengths
        # End tokens do not end a sample whose length is prescribed.
        self._stops = [] if self._lengths else list(stop_token_ids)
        self._forbidden = {token: -math.inf for token in forbidden_token_ids}
        self._seeded = sample_generators or sampling.deterministic
        self._growing: dict[str, Growing] = {}
        self._held: dict[str, list[tuple[str, dict[str, Any], SamplingParams]]] = {}
        """First sample of a group without a token -> requests of its other ones."""
        self._unstarted = 0
        """Samples in flight without a token."""

    def __len__(self) -> int:
        return len(self._growing)

    def add(self, seeded: SeededGroup, rendered: dict[str, Any]) -> None:
        """The first sample is vLLM's at once, the others when it has a token: their prompt is in the prefix cache then.

        vLLM looks there once, when a request first runs. Where a step has no room for a prompt's media it runs what comes before
        them, of all samples that wait, and each of these computes the whole prompt afterwards.
        """
        group = seeded.group
        requests = []
        for index, seed in enumerate(seeded.seeds.tolist()):
            request = f"{next(self._numbers)}.{group.group_index}.{index}"
            self._growing[request] = Growing(group.group_index, index)
            requests.append((request, rendered, self._params(seed)))
        self._unstarted += len(requests)
        first, *others = requests
        self._held[first[0]] = others
        self._requests.add(*first)

    def groups(self) -> set[int]:
        """Indices of groups that have a sample in flight."""
        return {sample.group_index for sample in self._growing.values()}

    def prefills(self, max_rows: int) -> bool:
        """Whether the next step has prompt tokens: some sample waits for its first token, and not only for one of `max_rows`."""
        return self._unstarted > max(0, len(self._growing) - max_rows)

    def step(self) -> list[work.FinishedSample]:
        """One step of the engine; the samples that it ended."""
        finished = []
        for name, tokens, logprobs, reason in self._requests.step():
            sample = self._growing.get(name)
            if sample is None:
                # Aborted, while a step with it was under way.
                continue
            self._unstarted -= not sample.tokens and bool(tokens)
            for request in self._held.pop(name, ()):
                self._requests.add(*request)
            if len(tokens) != len(logprobs):
                raise InternalError(f"vLLM gave {len(logprobs)} log-probabilities of {len(tokens)} tokens")
            if not all(map(math.isfinite, logprobs)):
                raise InternalError(f"non-finite log-probability of one of the tokens {tokens}", reason="NON_FINITE_LOGITS")
            sample.tokens.extend(tokens)
            sample.logprobs.extend(logprobs)
            if reason:
                del self._growing[name]
                if reason not in ("stop", "length"):
                    raise InternalError(f"vLLM ended a sample by itself: {reason}")
                finished.append(sample.finished(reason))
        return finished

    def unfinished(self) -> list[work.FinishedSample]:
        """What still grows, where it has a token."""
        return [sample.finished("aborted") for sample in self._growing.values() if sample.tokens]

    def abort(self) -> None:
        """Takes what is left out of the engine. Idempotent."""
        held = {request for others in self._held.values() for request, _, _ in others}
        self._requests.abort([request for request in self._growing if request not in held])
        self._growing.clear()
        self._held.clear()
        self._unstarted = 0

    def _params(self, seed: int) -> SamplingParams:
        limit = self._lengths.length(seed) if self._lengths else self._sampling.max_response_tokens
        return SamplingParams(
            temperature=0.0 if self._sampling.greedy else self._sampling.temperature,
            # torch's generators take 63 bits everywhere.
            seed=seed >> 1 if self._seeded else None, max_tokens=limit,
            # Only these end a response, and they stay in it: the checkpoint's other defaults do not apply.
            ignore_eos=True, stop_token_ids=self._stops, logit_bias=self._forbidden,
            # 0: the sampled token's own, nothing besides. Text is never made here: it was nine tenths of a step.
            logprobs=0, detokenize=False)
