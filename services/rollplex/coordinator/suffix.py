"""SUFFIX: log-probabilities, advantages, and each mini-batch's gradient up to its norm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from rollplex.coordinator import orders
from rollplex.coordinator.agreement import agreed_gradient, agreed_metrics
from rollplex.coordinator.metrics import merge_suffix_metrics
from rollplex.coordinator.overlap import in_company, prefix
from rollplex.coordinator.peers import EngineGroup, together
from rollplex.coordinator.records import Note, SampleRecord
from rollplex.coordinator.work import IterationWork
from rollplex.core.advantages import advantages, has_signal
from rollplex.core.crash_points import crash_point
from rollplex.core.packs import packs
from rollplex.core.phases import Phase, PhaseEvent
from rollplex.core.work import GradientResult, LossScale, ResponseGroup, ResponseSample

T = TypeVar("T")
Groups = dict[int, list[SampleRecord]]
PARTS = 4
"""Of a mini-batch whose groups the trainer begins with while the reference scores others. A reference that is paged comes to the
device once a part."""


async def score(work: IterationWork) -> list[int]:
    """Advantages, reference and old log-probabilities; the groups to train on, in index order. What an earlier coordinator has
    of them is in the journal and is not computed again."""
    groups = work.by_group()
    with work.timeline.span(Phase.SUFFIX, "advantage"):
        kept = _assign_advantages(work, groups)
    await work.journal.put_samples(work.key, work.samples.values())
    crash_point("coordinator.advantages.journalled")
    groups = {index: groups[index] for index in kept}
    if work.with_reference and not _scores_beside_training(work):
        with work.timeline.span(Phase.SUFFIX, "score"):
            await _reference_logprobs(work, groups, groups)
    if work.config.optimizer.updates_per_iteration > 1:
        with work.timeline.span(Phase.SUFFIX, "old_logprob"):
            for batch in mini_batches(work, kept):
                # All boundaries are needed: the first mini-batch is trained from them.
                await _logprobs(work, work.mesh.trainer, {index: groups[index] for index in batch}, "old_logprobs", keep=True,
                                again=lambda: _prefixes_again(work, work.mesh.trainer, groups))
    return kept


def _scores_beside_training(work: IterationWork) -> bool:
    """The trainer may begin with the groups that have their scores: of one update, since several want the old policy's first."""
    return work.with_reference and work.config.schedule == "overlap" and work.config.optimizer.updates_per_iteration == 1


async def _reference_logprobs(work: IterationWork, part: Groups, groups: Groups) -> None:
    """Of a part of `groups`; a reference that was lost needs the prefixes of all that it has not scored."""
    await _logprobs(work, work.mesh.reference, part, "reference_logprobs", keep=False, again=lambda: _prefixes_again(
        work, work.mesh.reference, _without(groups, "reference_logprobs")))


def _without(groups: Groups, name: str) -> Groups:
    """Those of which a sample lacks these log-probabilities."""
    return {index: samples for index, samples in groups.items() if any(getattr(one, name) is None for one in samples)}


async def _logprobs(work: IterationWork, group: EngineGroup, groups: Groups, name: str, *, keep: bool,
                    again: Callable[[], Awaitable[None]]) -> None:
    """Fills the samples' `name`, and the journal, one message after the other."""
    async def ask() -> None:
        asked = [ResponseGroup(index, tuple(ResponseSample(sample.sample_index, sample.token_ids) for sample in samples))
                 for index, samples in _without(groups, name).items()]
        for part in orders.in_messages(packs(asked, work.config.groups_per_pass)):
            order = orders.score_suffix(part, work.config.sampling.temperature, keep_boundaries=keep)
            outcomes = await group.command(order, work.place())
            # Of the first rank of each replica: every sample once.
            for scored in (sample for outcome in outcomes for sample in outcome.value.samples):
                setattr(work.samples[scored.group_index, scored.sample_index], name, scored.logprobs)
            await work.journal.put_samples(work.key, [sample for one in part for sample in groups[one.group_index]])

    if _without(groups, name):
        await work.recovery.survive(group, ask, redo=again, what=lambda: f"prefixes and log-probabilities of "
                                                                         f"{len(_without(groups, name))} groups")


async def _prefixes_again(work: IterationWork, group: EngineGroup, groups: Groups) -> None:
    order, span = ((orders.reference_prefix, "reference_prefix_again") if group is work.mesh.reference else
                   (orders.trainer_prefix, "trainer_prefix_again"))
    await prefix(work, group, span, order, in_company(work, groups), Phase.SUFFIX)


def _assign_advantages(work: IterationWork, groups: Groups) -> list[int]:
    """Sets every sample's advantage; returns the groups that stay."""
    kept, flat = [], 0
    for index, samples in groups.items():
        rewards = [sample.reward for sample in samples]
        for sample, advantage in zip(samples, advantages(rewards, work.config.loss.advantage)):
            sample.advantage = advantage
        flat += not has_signal(rewards)
        if has_signal(rewards) or not work.config.filter_zero_variance:
            kept.append(index)
    if not any(sample.reward is not None for samples in groups.values() for sample in samples):
        work.emit(Note("warning", "NOTHING_SCORED", "no sample has a reward: there is nothing to learn, the update is left out"))
        kept = []
    work.metrics["rollplex/groups_without_signal"] = float(flat)
    work.metrics["rollplex/groups_filtered"] = float(len(groups) - len(kept))
    return kept


def cut(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """In order, into `count` parts whose sizes differ by one at most; no part is empty."""
    count = min(count, len(items))
    bounds = [len(items) * index // count for index in range(count + 1)] if count else []
    return [items[start:stop] for start, stop in zip(bounds, bounds[1:])]


def mini_batches(work: IterationWork, kept: Sequence[int]) -> list[Sequence[int]]:
    """An update each."""
    return cut(kept, work.config.optimizer.updates_per_iteration)


async def mini_batch_gradient(work: IterationWork, index: int, batch: Sequence[int]) -> GradientResult:
    """Suffix and backward of one mini-batch, the indices of its groups, from SUFFIX into UPDATE. All but the first compute their
    prefix under the new snapshot. A trainer that is lost before the norm is known goes back to SUFFIX and begins the mini-batch
    anew."""
    trainer, parts = work.mesh.trainer, _Parts(work, batch)
    # The first one's are OVERLAP's.
    prompts = [work.prompts[group_index] for group_index in batch] if index else in_company(work, batch)

    async def begin() -> None:
        if work.phase is Phase.UPDATE:
            await work.move(PhaseEvent.GRADIENT_LOST)
        await prefix(work, trainer, "trainer_prefix_again", orders.trainer_prefix, prompts, Phase.SUFFIX)

    async def gradient() -> tuple[dict[str, float], GradientResult]:
        metrics = await _train(work, parts)
        crash_point("coordinator.suffix.done")
        await _leave(work)
        with work.timeline.span(Phase.UPDATE, "update"), work.timeline.span(Phase.UPDATE, "gradient_norm"):
            measured = await trainer.command(orders.measure_gradient(), work.place())
        return metrics, agreed_gradient([outcome.value for outcome in measured])

    def what() -> str:
        return f"prefixes and suffixes of {len(batch)} groups"

    if index:
        await work.recovery.survive(trainer, begin, what=what)
    (metrics, measured), _ = await together(work.recovery.survive(trainer, gradient, redo=begin, what=what),
                                           work.recovery.within(parts.score()))
    crash_point("coordinator.norm.agreed")
    work.average({**metrics, "actor/grad_norm": measured.grad_norm, "grad_norm": measured.grad_norm,
                  "rollplex/update_skipped": float(not measured.finite)})
    return measured


class _Parts:
    """A mini-batch's groups in the order of their training: `score` has the reference score a part while the trainer works on
    the ones before, which `scored` hands out. What was scored stays so, whatever becomes of the trainer."""

    def __init__(self, work: IterationWork, batch: Sequence[int]) -> None:
        self._work, by_group = work, work.by_group()
        self.groups = {index: by_group[index] for index in batch}
        self._beside = _scores_beside_training(work)
        # Groups that share a pass stay together: the update is the one of a mini-batch in one part, to the last bit.
        whole = self._packs(self.groups)
        # Replicas wait for each other between parts, so that each wants work in every one.
        most = max(1, len(whole) // work.mesh.trainer.replicas.count)
        self._parts = cut(whole, min(PARTS, most) if self._beside else 1)
        self._scored = [asyncio.Event() for _ in self._parts]

    async def score(self) -> None:
        if not self._beside:
            for event in self._scored:
                event.set()
            return
        with self._work.timeline.span(Phase.SUFFIX, "score"):
            for part, event in zip(self._parts, self._scored, strict=True):
                await _reference_logprobs(self._work, self._groups_of(part), self.groups)
                event.set()

    async def scored(self) -> AsyncIterator[list[ResponseGroup]]:
        """Messages to the trainer."""
        for part, event in zip(self._parts, self._scored, strict=True):
            await event.wait()
            for message in orders.in_messages(self._packs(self._groups_of(part))):
                yield message

    def _packs(self, groups: Groups) -> list[list[ResponseGroup]]:
        return packs(_responses(groups), self._work.config.groups_per_pass)

    def _groups_of(self, part: Sequence[Sequence[ResponseGroup]]) -> Groups:
        return {group.group_index: self.groups[group.group_index] for pack in part for group in pack}


def _responses(groups: Groups) -> list[ResponseGroup]:
    return [ResponseGroup(index, tuple(
        ResponseSample(sample.sample_index, sample.token_ids, sample.logprobs, sample.reference_logprobs, sample.old_logprobs,
                       sample.advantage or 0.0, sample.reward is not None)
        for sample in samples)) for index, samples in groups.items()]


async def _train(work: IterationWork, parts: _Parts) -> dict[str, float]:
    samples = [sample for group in parts.groups.values() for sample in group]
    scale = LossScale(len(samples), sum(len(sample.token_ids) for sample in samples),
                      work.config.sampling.max_response_tokens)
    with work.timeline.span(Phase.SUFFIX, "suffix"):
        found = [await work.mesh.trainer.command(orders.train_suffix(message, scale), work.place())
                 async for message in parts.scored()]
    return merge_suffix_metrics([metrics for outcomes in found for metrics in agreed_metrics(
        [outcome.value for outcome in outcomes], work.mesh.trainer.replicas)])


async def _leave(work: IterationWork) -> None:
    """Every reader leaves the snapshot. One that is gone has left: the broker makes sure before anybody writes."""
    mesh, place = work.mesh, work.place()
    others = [group for group in mesh.used_groups(work.with_reference) if group is not mesh.trainer]
    with work.timeline.span(Phase.SUFFIX, "leave"):
        await together(mesh.quiesce([mesh.trainer], place, leave_snapshot=True), *(
            work.recovery.spare(group, lambda group=group: mesh.let_go(group, place, leave_snapshot=True))
            for group in others))
        await work.move(PhaseEvent.READERS_QUIESCED)
