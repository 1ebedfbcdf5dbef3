"""The responses of groups over their boundaries: scoring without gradient, or loss and backward.

Legend: R_i tokens of response i, T packed tokens of a micro-batch, N samples.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rollplex.core.config import LossConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput
from rollplex.core.residency import Residency
from rollplex.core.work import LossScale, ResponseGroup, ResponseSample, SampleLogprobs, WorkContext
from rollplex.memory.arena import Arena
from rollplex.memory.transfer import to_device
from rollplex.model import ModelConfig, VisionLanguageModel, pack_responses, suffix_forward, token_logprobs
from rollplex.trainer.loss import Tokens, token_losses, token_weights
from rollplex.trainer.metrics import MetricSums
from rollplex.trainer.prefixes import Prefixes, ReadyPrefix
from rollplex.trainer.saved_bytes import SavedBytes

SUFFIX_ACTIVATIONS = "suffix_activations"


@dataclass(frozen=True, slots=True)
class SuffixRunner:
    """The suffix computations of a run. Samples go through in micro-batches of `micro_batch_samples` (0: a whole group)."""

    model: VisionLanguageModel
    arena: Arena
    prefixes: Prefixes
    loss: LossConfig
    temperature: float
    micro_batch_samples: int
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    saved: Literal["keep", "recompute"]
    """RunConfig.suffix_activations."""

    def check(self, groups: Sequence[ResponseGroup]) -> None:
        """Raises WrongState for a group without boundary, BadInput for responses that `check_responses` refuses."""
        for group in groups:
            self.prefixes.get(group.group_index)
            check_responses(group, self.model.config)

    def score(self, context: WorkContext, groups: Sequence[ResponseGroup], temperature: float, *, keep_boundaries: bool
              ) -> list[SampleLogprobs]:
        """Log-probabilities of every sample, in the groups' order."""
        scored: list[SampleLogprobs] = []
        for done, group in enumerate(groups, start=1):
            context.check()
            scored += self._score_group(self.prefixes.get(group.group_index), group, temperature)
            if not keep_boundaries:
                self.prefixes.release(group.group_index)
            crash_point("trainer.old_logprob.group")
            context.progress(done, len(groups), "groups")
        return scored

    def train(self, context: WorkContext, groups: Sequence[ResponseGroup], scale: LossScale) -> MetricSums:
        """Adds the gradient of the groups' share of the mini-batch's loss, in their order, and consumes their boundaries."""
        metrics = MetricSums()
        for done, group in enumerate(groups, start=1):
            context.check()
            metrics.merge(self._train_group(self.prefixes.get(group.group_index), group, scale))
            self.prefixes.release(group.group_index)
            crash_point("trainer.suffix.group")
            context.progress(done, len(groups), "groups")
        return metrics

    @torch.no_grad()
    def _score_group(self, ready: ReadyPrefix, group: ResponseGroup, temperature: float) -> list[SampleLogprobs]:
        """By the same micro-batches as `_train_group`, so that both agree to the last bit."""
        parts: list[torch.Tensor] = []
        for samples in self._micro_batches(group):
            parts += self._forward(ready, samples, temperature, with_entropy=False)[0]
        # The one place where the host waits for the group.
        scored = torch.cat(parts).float().cpu().split([len(part) for part in parts])
        return [SampleLogprobs(group.group_index, sample.sample_index, array("f", part.numpy().tobytes()))
                for sample, part in zip(group.samples, scored, strict=True)]

    def _train_group(self, ready: ReadyPrefix, group: ResponseGroup, scale: LossScale) -> MetricSums:
        """Suffixes first, then once through the prefix."""
        metrics = MetricSums()
        for samples in self._micro_batches(group):
            if any(sample.scored for sample in samples):
                metrics.merge(self._train_samples(ready, samples, scale))
        ready.boundary.backward()
        return metrics

    def _train_samples(self, ready: ReadyPrefix, samples: Sequence[ResponseSample], scale: LossScale) -> MetricSums:
        counter = SavedBytes([*self.model.parameters(), *(x for pair in ready.boundary.leaves() for x in pair)])
        metrics = MetricSums()
        with counter.counting():
            parts, entropies = self._forward(ready, samples, self.temperature, with_entropy=True)
            # Unscored samples go through the forward pass, because leaving them out would change the last bits of others.
            kept = [index for index, sample in enumerate(samples) if sample.scored]
            tokens = _tokens([samples[i] for i in kept], [parts[i] for i in kept], [entropies[i] for i in kept])
            losses = token_losses(tokens, self.loss)
            weights_T = token_weights(tokens, self.loss.aggregation, scale)
            total = (losses.total * weights_T).sum()
        with self.arena.hold(SUFFIX_ACTIVATIONS, Residency.HBM, counter.size_bytes):
            metrics.add(tokens, losses, weights_T)
            total.backward()
        return metrics

    def _forward(self, ready: ReadyPrefix, samples: Sequence[ResponseSample], temperature: float, *, with_entropy: bool
                 ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probabilities and entropies, one [R_i] a sample each."""
        responses = [torch.frombuffer(sample.token_ids, dtype=torch.int64) for sample in samples]
        packed = pack_responses(ready.last_token, responses, ready.suffix_position).to(self.model.head_weight.device)
        hidden_TD = suffix_forward(self.model, ready.boundary, packed, self.saved)
        logp_T, entropy_T = token_logprobs(
            self.model, hidden_TD, packed.targets, temperature=temperature,
            forbidden=self.model.config.forbidden_token_ids, chunk_tokens=self.chunk_tokens, with_entropy=with_entropy)
        return packed.split(logp_T), [] if entropy_T is None else packed.split(entropy_T)

    def _micro_batches(self, group: ResponseGroup) -> Iterator[tuple[ResponseSample, ...]]:
        size = self.micro_batch_samples or len(group.samples)
        for start in range(0, len(group.samples), size):
            yield group.samples[start:start + size]


def _tokens(samples: Sequence[ResponseSample], logprobs: Sequence[torch.Tensor], entropies: Sequence[torch.Tensor]
            ) -> Tokens:
    """`check_responses` has seen the samples: an optional array is there for all of a group or for none."""
    logp_T = torch.cat(list(logprobs))

    def joined(name: str) -> torch.Tensor | None:
        arrays = [getattr(sample, name) for sample in samples]
        if arrays[0] is None:
            return None
        values_T = torch.cat([torch.frombuffer(values, dtype=torch.float32) for values in arrays])
        return to_device(values_T.to(logp_T.dtype), logp_T.device)

    advantages_N = to_device(torch.tensor([sample.advantage for sample in samples], dtype=logp_T.dtype), logp_T.device)
    return Tokens(logp_T, advantages_N, tuple(len(sample.token_ids) for sample in samples),
                  old_logprobs=joined("old_logprobs"), reference_logprobs=joined("reference_logprobs"),
                  rollout_logprobs=joined("rollout_logprobs"), entropy=torch.cat(list(entropies)))


def check_responses(group: ResponseGroup, config: ModelConfig) -> None:
    """Raises BadInput, naming group and sample, for a response that is empty or holds a token that rollout may not sample,
    for arrays that do not fit it, or for an advantage that is not finite."""
    for name in ("rollout_logprobs", "reference_logprobs", "old_logprobs"):
        given = [getattr(sample, name) is not None for sample in group.samples]
        if any(given) and not all(given):
            raise BadInput(f"group {group.group_index}: {name} is given for some samples only", reason="BAD_RESPONSE",
                           group_index=group.group_index)
    for sample in group.samples:
        wrong = _wrong_with(sample, config)
        if wrong:
            raise BadInput(f"group {group.group_index}, sample {sample.sample_index}: {wrong}", reason="BAD_RESPONSE",
                           group_index=group.group_index, sample_index=sample.sample_index)


def _wrong_with(sample: ResponseSample, config: ModelConfig) -> str:
    length = len(sample.token_ids)
    if not length:
        return "the response is empty"
    if min(sample.token_ids) < 0 or max(sample.token_ids) >= config.vocab_size:
        return f"a token lies outside the vocabulary of {config.vocab_size}"
    forbidden = set(sample.token_ids).intersection(config.forbidden_token_ids)
    if forbidden:
        return f"token {min(forbidden)} is a vision token, which no response may hold"
    for name in ("rollout_logprobs", "reference_logprobs", "old_logprobs"):
        values = getattr(sample, name)
        if values is not None and len(values) != length:
            return f"{len(values)} {name} for {length} tokens"
    return "" if math.isfinite(sample.advantage) else f"advantage {sample.advantage}"
