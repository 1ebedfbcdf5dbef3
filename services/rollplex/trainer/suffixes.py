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
from rollplex.core.packs import packs
from rollplex.core.residency import Residency
from rollplex.core.work import LossScale, ResponseGroup, ResponseSample, SampleLogprobs, WorkContext
from rollplex.engine.ready_prefixes import ReadyPrefix, ReadyPrefixes
from rollplex.memory.arena import Arena
from rollplex.memory.transfer import to_device
from rollplex.model import ModelConfig, Ranks, VisionLanguageModel, pack_groups, pack_responses, suffix_forward, token_logprobs
from rollplex.trainer.loss import Tokens, token_losses, token_weights
from rollplex.trainer.metrics import MetricSums
from rollplex.trainer.saved_bytes import SavedBytes

SUFFIX_ACTIVATIONS = "suffix_activations"


@dataclass(frozen=True, slots=True)
class Part:
    """Of a micro-batch: samples of one group."""

    ready: ReadyPrefix
    samples: Sequence[ResponseSample]

    @property
    def scored(self) -> bool:
        return any(sample.scored for sample in self.samples)


@dataclass(frozen=True, slots=True)
class SuffixRunner:
    """The suffix computations of a run. `groups_per_pass` go through together (RunConfig); of one group alone,
    `micro_batch_samples` (0: all)."""

    model: VisionLanguageModel
    ranks: Ranks
    """Of several replicas each takes its own groups of a pack."""
    arena: Arena
    ready: ReadyPrefixes
    loss: LossConfig
    temperature: float
    micro_batch_samples: int
    groups_per_pass: int
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    saved: Literal["keep", "recompute"]
    """RunConfig.suffix_activations."""

    def check(self, groups: Sequence[ResponseGroup]) -> None:
        """Raises WrongState for a group without boundary, BadInput for responses that `check_responses` refuses."""
        self.ready.require(group.group_index for group in self.ranks.own(groups))
        for group in groups:
            check_responses(group, self.model.config)

    def score(self, context: WorkContext, groups: Sequence[ResponseGroup], temperature: float, *, keep_boundaries: bool
              ) -> list[SampleLogprobs]:
        """Log-probabilities of every sample of the own groups, in their order."""
        scored: dict[int, list[SampleLogprobs]] = {}
        own = self.ranks.own(groups)
        for pack in self.ranks.own_packs(packs(groups, self.groups_per_pass)):
            context.check()
            scored |= self._score_pack(pack, temperature)
            if not keep_boundaries:
                self.ready.release(group.group_index for group in pack)
            for _ in pack:
                crash_point("trainer.old_logprob.group")
            context.progress(len(scored), len(own), "groups")
        return [sample for group in own for sample in scored[group.group_index]]

    def train(self, context: WorkContext, groups: Sequence[ResponseGroup], scale: LossScale) -> MetricSums:
        """Adds the gradient of the groups' share of the mini-batch's loss, in their order, and consumes their boundaries."""
        metrics, done, count = MetricSums(), 0, len(self.ranks.own(groups))
        for pack in self.ranks.own_packs(packs(groups, self.groups_per_pass)):
            context.check()
            for batch in self._micro_batches(pack):
                if any(part.scored for part in batch):
                    metrics.merge(self._train_batch(batch, scale))
            # Suffixes first, then once through their prefix, which the groups of a pack have gone through together.
            indices = [group.group_index for group in pack]
            self.ready.backward(indices)
            self.ready.release(indices)
            for _ in pack:
                crash_point("trainer.suffix.group")
                done += 1
                context.progress(done, count, "groups")
        return metrics

    @torch.no_grad()
    def _score_pack(self, pack: Sequence[ResponseGroup], temperature: float) -> dict[int, list[SampleLogprobs]]:
        """By group_index; by the same micro-batches as `train`, so that both agree to the last bit."""
        parts: list[torch.Tensor] = []
        for batch in self._micro_batches(pack):
            parts += self._forward(batch, temperature, with_entropy=False)[0]
        # The one place where the host waits for these groups.
        scored = iter(torch.cat(parts).float().cpu().split([len(part) for part in parts]))
        return {group.group_index: [
            SampleLogprobs(group.group_index, sample.sample_index, array("f", next(scored).numpy().tobytes()))
            for sample in group.samples] for group in pack}

    def _train_batch(self, batch: Sequence[Part], scale: LossScale) -> MetricSums:
        leaves = [x for part in batch for pair in part.ready.boundary.leaves() for x in pair]
        counter = SavedBytes([*self.model.parameters(), *leaves])
        metrics, shares = MetricSums(), []
        with counter.counting():
            logprobs, entropies = map(iter, self._forward(batch, self.temperature, with_entropy=True))
            for part in batch:
                found = [(sample, next(logprobs), next(entropies)) for sample in part.samples]
                # Unscored samples go through the forward pass, because leaving them out would change the last bits of others.
                if part.scored:
                    tokens = _tokens(*zip(*(triple for triple in found if triple[0].scored), strict=True))
                    shares.append((tokens, token_losses(tokens, self.loss), token_weights(tokens, self.loss.aggregation, scale)))
            total = sum((losses.total * weights_T).sum() for _, losses, weights_T in shares)
        with self.arena.hold(SUFFIX_ACTIVATIONS, Residency.HBM, counter.size_bytes):
            for share in shares:
                metrics.add(*share)
            total.backward()
        return metrics

    def _forward(self, batch: Sequence[Part], temperature: float, *, with_entropy: bool
                 ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probabilities and entropies, one [R_i] a sample each."""
        packed = pack_groups([pack_responses(
            part.ready.last_token, [torch.frombuffer(sample.token_ids, dtype=torch.int64) for sample in part.samples],
            part.ready.suffix_position) for part in batch]).to(self.model.head_weight.device)
        hidden_TD = suffix_forward(self.model, [part.ready.boundary for part in batch], packed, self.saved)
        logp_T, entropy_T = token_logprobs(
            self.model, hidden_TD, packed.targets, temperature=temperature,
            forbidden=self.model.config.forbidden_token_ids, chunk_tokens=self.chunk_tokens, with_entropy=with_entropy)
        return packed.split(logp_T), [] if entropy_T is None else packed.split(entropy_T)

    def _micro_batches(self, pack: Sequence[ResponseGroup]) -> Iterator[list[Part]]:
        """Of one pack: all its groups at once, or a single one in parts."""
        parts = [Part(self.ready.get(group.group_index), group.samples) for group in pack]
        size = self.micro_batch_samples or len(parts[0].samples)
        if len(parts) > 1:
            yield parts
            return
        for start in range(0, len(parts[0].samples), size):
            yield [Part(parts[0].ready, parts[0].samples[start:start + size])]


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
