"""One iteration, as straight code: OVERLAP, SUFFIX, UPDATE, with a barrier between each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollplex.coordinator import orders
from rollplex.coordinator.agreement import agreed_metrics
from rollplex.coordinator.intake import Intake, Prompt
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import NOTHING, Mesh
from rollplex.coordinator.metrics import group_metrics, merge_suffix_metrics, sample_metrics, time_metrics
from rollplex.coordinator.peers import EngineGroup, Place, together
from rollplex.coordinator.planner import IterationNeeds, longest_micro_batch
from rollplex.coordinator.records import EventBody, IterationKey, Note, ProgressReport, Run, SampleRecord
from rollplex.coordinator.rewards import RewardDesk, ScoreInput
from rollplex.coordinator.timeline import Timeline
from rollplex.coordinator.update import apply_update
from rollplex.core.advantages import advantages, has_signal
from rollplex.core.config import RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import DataLoss, DeadlineExceeded, RollplexError
from rollplex.core.phases import Phase, PhaseEvent, next_phase
from rollplex.core.work import FinishedSample, GenerateResult, LossScale, ResponseGroup, ResponseSample, Sampling

log = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.2


@dataclass(slots=True)
class IterationWork:
    """Everything that one iteration or validation works with."""

    key: IterationKey
    run: Run
    config: RunConfig
    prompts: Sequence[Prompt]
    mesh: Mesh
    journal: Journal
    intake: Intake
    emit: Callable[[EventBody], None]
    desk_of: Callable[[Callable], RewardDesk]
    recorded: Callable[[], Awaitable[list[SampleRecord]]] | None = None
    """Of a replay: the samples, scored, that are taken in place of rollout's."""
    needs: IterationNeeds = NOTHING
    """Of each phase, from when the mesh is ready."""
    phase: Phase = Phase.IDLE
    samples: dict[tuple[int, int], SampleRecord] = field(default_factory=dict)
    timeline: Timeline = None
    metrics: dict[str, float] = field(default_factory=dict)
    batch_count: int = 0
    """Mini-batches of this iteration, an update each."""
    updates_published: int = 0
    """Updates that are behind it, skipped ones included."""
    update_begun: bool = False
    """Between UPDATE_BEGIN and publish: only forward from here."""
    ending: bool = False
    """Its outcome is being written."""
    unscored_noted: bool = False
    progress_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.emit)

    @property
    def with_reference(self) -> bool:
        return self.config.loss.kl_coef > 0 and not self.key.validation

    def place(self) -> Place:
        return Place(self.run.name, self.key.iteration, self.run.snapshot, self.config.phase_timeout_s, self.phase)

    def average(self, metrics: dict[str, float]) -> None:
        """Adds one mini-batch's share to metrics that are means over mini-batches."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value / self.batch_count

    async def move(self, event: PhaseEvent) -> None:
        """Through a barrier: the table says where to, the broker checks what is held."""
        self.phase = next_phase(self.phase, event)
        await self.mesh.enter_phase(self.run.name, self.key.iteration, self.phase, self.needs)

    def plan(self) -> None:
        """After the mesh is ready, and again when the responses are fixed."""
        prompts = [len(prompt.group.token_ids) for prompt in self.prompts]
        responses = [[len(sample.token_ids) for sample in samples] for samples in self.by_group().values()]
        self.needs = self.mesh.needs(
            self.config, prompts, generates=self.recorded is None, trains=not self.key.validation,
            media=[prompt.group.media for prompt in self.prompts],
            response_tokens=longest_micro_batch(responses, self.config.suffix_micro_batch_samples))

    def by_group(self) -> dict[int, list[SampleRecord]]:
        groups: dict[int, list[SampleRecord]] = defaultdict(list)
        for _, sample in sorted(self.samples.items()):
            groups[sample.group_index].append(sample)
        return groups


async def run_iteration(work: IterationWork) -> None:
    """k -> k+1. On an error before UPDATE begins nothing has changed; see update.py for after."""
    with work.timeline.span(Phase.IDLE, "ready"):
        await work.mesh.ensure_ready(work.run, work.config.phase_timeout_s, work.with_reference)
        work.plan()
        await work.move(PhaseEvent.BEGIN)
    with work.timeline.span(Phase.OVERLAP, "overlap"):
        await _within_deadline(_overlap(work), work, "OVERLAP")
    with work.timeline.span(Phase.OVERLAP, "release"):
        await work.mesh.quiesce(work.mesh.rollouts, work.place(), leave_snapshot=False)
        work.plan()
    await work.move(PhaseEvent.RESPONSES_FIXED)
    kept = await _within_deadline(_score(work), work, "SUFFIX")
    batches = _mini_batches(kept, work.config.optimizer.updates_per_iteration)
    work.batch_count = len(batches)
    for index, batch in enumerate(batches):
        await _train_mini_batch(work, index, batch)
    if not batches:
        work.metrics["rollplex/update_skipped"] = 1.0
        await work.mesh.quiesce(work.mesh.used_groups(work.with_reference), work.place(), leave_snapshot=False)
        await work.move(PhaseEvent.ENDED)
    _measure(work)
    # The iteration is done whatever the broker answers.
    with contextlib.suppress(RollplexError):
        work.metrics.update({f"memory/unexplained_bytes/{phase}": float(size)
                             for phase, size in (await work.mesh.unexplained(work.run.name)).items()})


async def run_validation(work: IterationWork) -> None:
    """Greedy responses and their rewards under the current snapshot; nothing is trained."""
    await work.mesh.ensure_ready(work.run, work.config.phase_timeout_s, False)
    work.plan()
    await work.move(PhaseEvent.BEGIN)
    desk = work.desk_of(_on_scored(work))
    try:
        await _within_deadline(_generate(work, desk), work, "OVERLAP")
        with work.timeline.span(Phase.OVERLAP, "reward"):
            await desk.finish(work.config.phase_timeout_s)
    finally:
        await desk.close()
    await work.journal.put_samples(work.key, work.samples.values())
    await work.mesh.quiesce(work.mesh.rollouts, work.place(), leave_snapshot=False)
    await work.move(PhaseEvent.ENDED)
    _report_progress(work, final=True)
    work.metrics.update(sample_metrics(work.prompts, list(work.samples.values())))
    work.metrics.update(time_metrics(work.timeline, work.metrics["perf/total_num_tokens"]))


async def _within_deadline(coroutine: Awaitable, work: IterationWork, name: str):
    try:
        return await asyncio.wait_for(coroutine, work.config.phase_timeout_s + 5.0)
    except TimeoutError:
        raise DeadlineExceeded(f"phase {name} did not end within {work.config.phase_timeout_s:g} s",
                               reason="PHASE_TIMEOUT", phase=name) from None


# OVERLAP

async def _overlap(work: IterationWork) -> None:
    if work.recorded is not None:
        await _scheduled(work, _take_recorded(work, work.recorded))
    else:
        desk = work.desk_of(_on_scored(work))
        try:
            await _scheduled(work, _generate(work, desk))
            with work.timeline.span(Phase.OVERLAP, "reward"):
                await desk.finish(work.config.phase_timeout_s - work.timeline.now_s())
        finally:
            await desk.close()
    await work.journal.put_samples(work.key, work.samples.values())
    crash_point("coordinator.responses.journalled")
    _report_progress(work, final=True)


async def _scheduled(work: IterationWork, responses: Awaitable) -> None:
    """Responses and prefixes, side by side or one after the other."""
    if work.config.schedule == "overlap":
        await together(responses, *_prefixes(work))
        return
    await responses
    for prefix in _prefixes(work):
        await prefix


async def _take_recorded(work: IterationWork, recorded: Callable[[], Awaitable[list[SampleRecord]]]) -> None:
    with work.timeline.span(Phase.OVERLAP, "replay"):
        work.samples = {(sample.group_index, sample.sample_index): sample for sample in await recorded()}


async def _generate(work: IterationWork, desk: RewardDesk) -> None:
    """Every finished sample is journalled and goes to its rewards at once, while others still decode."""
    sampling = work.config.sampling
    order = Sampling(sampling.temperature, sampling.max_response_tokens, greedy=work.key.validation,
                     seed=work.config.seed, deterministic=work.config.deterministic,
                     length_distribution="" if work.key.validation else sampling.length_distribution)

    async def on_samples(finished: Sequence[FinishedSample]) -> None:
        records = [SampleRecord(sample.group_index, sample.sample_index, sample.token_ids, sample.logprobs,
                                sample.finish_reason, work.intake.text(sample.token_ids)) for sample in finished]
        crash_point("coordinator.sample.received")
        await work.journal.put_samples(work.key, records)
        crash_point("coordinator.sample.committed")
        for record in records:
            work.samples[record.group_index, record.sample_index] = record
        desk.push([_score_input(work.prompts[record.group_index], record) for record in records])
        _report_progress(work)

    async def one(group: EngineGroup, prompts: Sequence[Prompt]) -> None:
        outcomes = await group.command(orders.generate([prompt.group for prompt in prompts], order),
                                           work.place(), on_samples=on_samples)
        _check_hashes(group.role, prompts, outcomes[0].value.prompt_hashes)
        _note_rollout(work.metrics, outcomes[0].value)

    replicas = work.mesh.rollouts
    with work.timeline.span(Phase.OVERLAP, "generate"):
        await together(*(one(group, work.prompts[index::len(replicas)]) for index, group in enumerate(replicas)
                     if work.prompts[index::len(replicas)]))


def _note_rollout(metrics: dict[str, float], result: GenerateResult) -> None:
    """Replicas work side by side: the slowest one counts."""
    metrics["rollplex/rollout/prefill_s"] = max(metrics.get("rollplex/rollout/prefill_s", 0.0), result.prefill_s)
    if result.decode_s >= metrics.get("rollplex/rollout/decode_s", 0.0):
        metrics["rollplex/rollout/decode_s"] = result.decode_s
        metrics["rollplex/rollout/decode_steps"] = float(result.decode_steps)
        if result.decode_steps:
            metrics["rollplex/rollout/decode_batch"] = result.decode_rows / result.decode_steps


def _prefixes(work: IterationWork) -> list[Awaitable]:
    """The prefixes that this iteration needs, as coroutines."""
    prefixes = []
    if work.with_reference:
        prefixes.append(_prefix(work, work.mesh.reference, "reference_prefix", orders.reference_prefix, work.prompts))
    prefixes.append(_prefix(work, work.mesh.trainer, "trainer_prefix", orders.trainer_prefix, work.prompts))
    return prefixes


async def _prefix(work: IterationWork, group: EngineGroup, span: str, order: Callable[..., orders.Order],
                  prompts: Sequence[Prompt], phase: Phase = Phase.OVERLAP) -> None:
    with work.timeline.span(phase, span):
        for outcome in await group.command(order([prompt.group for prompt in prompts]), work.place()):
            _check_hashes(group.role, prompts, outcome.value.prompt_hashes)


def _check_hashes(role: str, prompts: Sequence[Prompt], hashes: Sequence[str]) -> None:
    """Every engine must have seen the same token ids, grids and timing."""
    for prompt, found in zip(prompts, hashes, strict=True):
        if found != prompt.group.prompt_hash:
            raise DataLoss(f"{role} read another prompt {prompt.group.group_index} than the coordinator: hash {found}, "
                           f"expected {prompt.group.prompt_hash}", reason="PROMPT_MISMATCH")


def _score_input(prompt: Prompt, record: SampleRecord) -> ScoreInput:
    row = prompt.row
    return ScoreInput(record.group_index, record.sample_index, json.dumps(row.messages), record.text, record.token_ids,
                      row.ground_truth, row.problem_type, row.data_source, json.dumps(row.columns))


def _on_scored(work: IterationWork) -> Callable:
    def on_scored(item: ScoreInput, reward: float | None, parts: dict[str, float], error: str) -> None:
        record = work.samples[item.group_index, item.sample_index]
        record.reward, record.parts = reward, parts
        if error and not work.unscored_noted:
            work.unscored_noted = True
            work.emit(Note("warning", "UNSCORED", f"group {item.group_index}, sample {item.sample_index} is unscored: "
                                                  f"{error} (further ones are counted only)"))

    return on_scored


def _report_progress(work: IterationWork, *, final: bool = False) -> None:
    now_s = time.monotonic()
    if not final and now_s - work.progress_at_s < PROGRESS_PERIOD_S:
        return
    work.progress_at_s = now_s
    samples = work.samples.values()
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    work.emit(ProgressReport(
        len(samples), sum(prompt.group.sample_count for prompt in work.prompts), len(rewards),
        sum(len(sample.token_ids) for sample in samples), sum(rewards) / len(rewards) if rewards else None))


# SUFFIX

async def _score(work: IterationWork) -> list[ResponseGroup]:
    """Reference and old log-probabilities, advantages; the groups to train on, in index order."""
    groups = work.by_group()
    references: dict[tuple[int, int], object] = {}
    if work.with_reference:
        with work.timeline.span(Phase.SUFFIX, "score"):
            references = await _logprobs(work, work.mesh.reference, groups, keep=False)
    with work.timeline.span(Phase.SUFFIX, "advantage"):
        kept = _assign_advantages(work, groups)
    await work.journal.put_samples(work.key, work.samples.values())
    crash_point("coordinator.advantages.journalled")
    old: dict[tuple[int, int], object] = {}
    if work.config.optimizer.updates_per_iteration > 1 and kept:
        with work.timeline.span(Phase.SUFFIX, "old_logprob"):
            old = await _logprobs(work, work.mesh.trainer, {index: groups[index] for index in kept}, keep=True)
    return [ResponseGroup(index, tuple(
        ResponseSample(sample.sample_index, sample.token_ids, sample.logprobs,
                       references.get((index, sample.sample_index)), old.get((index, sample.sample_index)),
                       sample.advantage or 0.0, sample.reward is not None)
        for sample in groups[index])) for index in kept]


async def _logprobs(work: IterationWork, group: EngineGroup, groups: dict[int, list[SampleRecord]], *, keep: bool
                    ) -> dict[tuple[int, int], object]:
    asked = [ResponseGroup(index, tuple(ResponseSample(sample.sample_index, sample.token_ids) for sample in samples))
             for index, samples in groups.items()]
    logprobs = {}
    for part in orders.in_messages(asked):
        order = orders.score_suffix(part, work.config.sampling.temperature, keep_boundaries=keep)
        outcomes = await group.command(order, work.place())
        logprobs.update({(scored.group_index, scored.sample_index): scored.logprobs
                         for scored in outcomes[0].value.samples})
    return logprobs


def _assign_advantages(work: IterationWork, groups: dict[int, list[SampleRecord]]) -> list[int]:
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


def _mini_batches(groups: Sequence[ResponseGroup], count: int) -> list[Sequence[ResponseGroup]]:
    """Cuts the groups, in order, into `count` parts whose sizes differ by one at most; no part is empty."""
    count = min(count, len(groups))
    bounds = [len(groups) * index // count for index in range(count + 1)] if count else []
    return [groups[start:stop] for start, stop in zip(bounds, bounds[1:])]


async def _train_mini_batch(work: IterationWork, index: int, batch: Sequence[ResponseGroup]) -> None:
    """Suffix, backward and update of one mini-batch. All but the first compute their prefix under the new snapshot."""
    if index:
        prompts = [work.prompts[group.group_index] for group in batch]
        await _prefix(work, work.mesh.trainer, "trainer_prefix_again", orders.trainer_prefix, prompts, Phase.SUFFIX)
    samples = [sample for group in batch for sample in group.samples]
    scale = LossScale(len(samples), sum(len(sample.token_ids) for sample in samples),
                      work.config.sampling.max_response_tokens)
    with work.timeline.span(Phase.SUFFIX, "suffix"):
        parts = [await work.mesh.trainer.command(orders.train_suffix(part, scale), work.place())
                 for part in orders.in_messages(batch)]
    work.average(merge_suffix_metrics([agreed_metrics([outcome.value for outcome in outcomes]) for outcomes in parts]))
    crash_point("coordinator.suffix.done")
    await apply_update(work, index)


def _measure(work: IterationWork) -> None:
    work.metrics.update(sample_metrics(work.prompts, list(work.samples.values())))
    work.metrics.update(group_metrics(list(work.by_group().values())))
    work.metrics.update(time_metrics(work.timeline, work.metrics["perf/total_num_tokens"]))
    work.metrics["training/global_step"] = float(work.run.optimizer_step)
