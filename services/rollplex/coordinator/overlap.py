"""OVERLAP: responses, their rewards, and the prefixes beside them. A service that is lost does its own part again, alone."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from rollplex.coordinator import orders
from rollplex.coordinator.intake import Prompt
from rollplex.coordinator.peers import EngineGroup, together
from rollplex.coordinator.records import Note, ProgressReport, SampleRecord
from rollplex.coordinator.rewards import RewardDesk, ScoreInput, Verdict
from rollplex.coordinator.work import IterationWork
from rollplex.core.advantages import has_signal
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import DataLoss
from rollplex.core.packs import companions
from rollplex.core.phases import Phase
from rollplex.core.work import FinishedSample, GenerateResult, Sampling

PROGRESS_PERIOD_S = 0.2


async def overlap(work: IterationWork) -> None:
    """Every group complete, every sample scored or found unscored, every prefix that is needed materialised."""
    if work.recorded is not None:
        await _scheduled(work, _take_recorded(work, work.recorded))
        await _fix(work)
    else:
        await _rewarded(work, lambda desk: _scheduled(work, _generate(work, desk)))


async def respond(work: IterationWork) -> None:
    """A validation's part of the above: no prefixes."""
    await _rewarded(work, lambda desk: _generate(work, desk))


async def _rewarded(work: IterationWork, generation: Callable[[RewardDesk], Awaitable[None]]) -> None:
    desk, began_s = work.desk_of(_on_scored(work)), time.monotonic()
    try:
        await generation(desk)
        with work.timeline.span(Phase.OVERLAP, "reward"):
            await desk.finish(max(0.0, work.recovery.left_s(began_s)))
    finally:
        await desk.close()
    await _fix(work)


async def _fix(work: IterationWork) -> None:
    """From here on responses and rewards are what they are."""
    for sample in work.samples.values():
        sample.scored = True
    work.former.clear()
    await work.journal.put_samples(work.key, work.samples.values())
    crash_point("coordinator.responses.journalled")
    report_progress(work, final=True)


async def _scheduled(work: IterationWork, responses: Awaitable) -> None:
    """Responses and prefixes, side by side or one after the other."""
    if work.config.schedule == "overlap":
        await together(responses, *_prefixes(work))
        return
    await responses
    for prefix in _prefixes(work):
        await prefix


async def _take_recorded(work: IterationWork, recorded: Callable[[], Awaitable[list[SampleRecord]]]) -> None:
    if not work.incomplete(work.prompts):
        return
    with work.timeline.span(Phase.OVERLAP, "replay"):
        work.samples = {(sample.group_index, sample.sample_index): sample for sample in await recorded()}


async def _generate(work: IterationWork, desk: RewardDesk) -> None:
    """Every finished sample is journalled and goes to its rewards at once, while others still decode. A group that is complete
    is never generated again, one that is not is generated whole."""
    sampling = work.config.sampling
    order = Sampling(sampling.temperature, sampling.max_response_tokens, greedy=work.key.validation,
                     seed=work.config.seed, deterministic=work.config.deterministic,
                     length_distribution="" if work.key.validation else sampling.length_distribution)

    async def on_samples(finished: Sequence[FinishedSample]) -> None:
        records = [_record(work, sample) for sample in finished]
        # First, so that a score that is on its way finds the record.
        for record in records:
            work.samples[record.group_index, record.sample_index] = record
        crash_point("coordinator.sample.received")
        await work.journal.put_samples(work.key, records)
        crash_point("coordinator.sample.committed")
        _ask_rewards(work, desk, records)
        report_progress(work)

    async def one(group: EngineGroup, prompts: Sequence[Prompt]) -> None:
        left = work.incomplete(prompts)
        await work.set_aside(left)
        if left:
            outcomes = await group.command(orders.generate([prompt.group for prompt in left], order),
                                           work.place(), on_samples=on_samples)
            check_hashes(group.role, left, outcomes[0].value.prompt_hashes)
            _note_rollout(work.metrics, outcomes[0].value)

    def survived(group: EngineGroup, prompts: Sequence[Prompt]) -> Awaitable[None]:
        return work.recovery.survive(group, lambda: one(group, prompts),
                                     what=lambda: f"{len(work.incomplete(prompts))} of {len(prompts)} groups")

    replicas = work.mesh.rollouts
    with work.timeline.span(Phase.OVERLAP, "generate"):
        _ask_rewards(work, desk, list(work.samples.values()))
        await together(*(survived(group, work.prompts[index::len(replicas)]) for index, group in enumerate(replicas)
                         if work.prompts[index::len(replicas)]))


def _record(work: IterationWork, sample: FinishedSample) -> SampleRecord:
    """The same response once more keeps its record, and with it a score that it has or that is on its way."""
    known = work.former.pop((sample.group_index, sample.sample_index), None)
    if known is not None and (known.token_ids, known.finish_reason) == (sample.token_ids, sample.finish_reason):
        known.logprobs = sample.logprobs
        return known
    return SampleRecord(sample.group_index, sample.sample_index, sample.token_ids, sample.logprobs, sample.finish_reason,
                        work.intake.text(sample.token_ids))


def _ask_rewards(work: IterationWork, desk: RewardDesk, records: Sequence[SampleRecord]) -> None:
    asked = [record for record in records if record.whole and not record.scored and not record.asked]
    for record in asked:
        record.asked = True
    if asked:
        desk.push([_score_input(work.prompts[record.group_index], record) for record in asked])


def _score_input(prompt: Prompt, record: SampleRecord) -> ScoreInput:
    row = prompt.row
    return ScoreInput(record.group_index, record.sample_index, json.dumps(row.messages), record.text, record.token_ids,
                      row.ground_truth, row.problem_type, row.data_source, json.dumps(row.columns))


def _on_scored(work: IterationWork) -> Callable:
    async def on_scored(verdicts: Sequence[Verdict]) -> None:
        told = []
        for verdict in verdicts:
            key = (verdict.item.group_index, verdict.item.sample_index)
            record = work.samples.get(key) or work.former.get(key)
            if record is None or record.token_ids is not verdict.item.token_ids:
                continue  # another response has taken its place
            record.reward, record.parts, record.scored = verdict.reward, verdict.parts, True
            if key in work.samples:
                told.append(record)
            if verdict.error and not work.unscored_noted:
                work.unscored_noted = True
                work.emit(Note("warning", "UNSCORED", f"group {key[0]}, sample {key[1]} is unscored: {verdict.error} "
                                                      "(further ones are counted only)"))
        crash_point("coordinator.reward.scored")
        await work.journal.put_samples(work.key, told)
        crash_point("coordinator.reward.journalled")

    return on_scored


def report_progress(work: IterationWork, *, final: bool = False) -> None:
    now_s = time.monotonic()
    if not final and now_s - work.progress_at_s < PROGRESS_PERIOD_S:
        return
    work.progress_at_s = now_s
    samples = work.samples.values()
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    work.emit(ProgressReport(
        len(samples), sum(prompt.group.sample_count for prompt in work.prompts), len(rewards),
        sum(len(sample.token_ids) for sample in samples), sum(rewards) / len(rewards) if rewards else None))


def _note_rollout(metrics: dict[str, float], result: GenerateResult) -> None:
    """Replicas work side by side: the slowest one counts."""
    metrics["rollplex/rollout/prefill_s"] = max(metrics.get("rollplex/rollout/prefill_s", 0.0), result.prefill_s)
    if result.decode_s >= metrics.get("rollplex/rollout/decode_s", 0.0):
        metrics["rollplex/rollout/decode_s"] = result.decode_s
        metrics["rollplex/rollout/decode_steps"] = float(result.decode_steps)
        if result.decode_steps:
            metrics["rollplex/rollout/decode_batch"] = result.decode_rows / result.decode_steps


def _prefixes(work: IterationWork) -> list[Awaitable]:
    """The prefixes that this iteration still needs, as coroutines."""
    mesh, survive, prefixes = work.mesh, work.recovery.survive, []
    unscored = in_company(work, unreferenced(work))
    if work.with_reference and unscored:
        prefixes.append(survive(
            mesh.reference, lambda: prefix(work, mesh.reference, "reference_prefix", orders.reference_prefix, unscored),
            what=lambda: f"{len(unscored)} prefixes"))
    if not work.updates_published:
        prefixes.append(survive(
            mesh.trainer, lambda: prefix(work, mesh.trainer, "trainer_prefix", orders.trainer_prefix, work.prompts),
            what=lambda: f"{len(work.prompts)} prefixes"))
    return prefixes


def unreferenced(work: IterationWork) -> list[int]:
    """Indices of groups of which a sample lacks the reference's log-probabilities, and that are not left out of training."""
    def needless(prompt: Prompt) -> bool:
        samples = [work.samples.get((prompt.group.group_index, index)) for index in range(prompt.group.sample_count)]
        if any(sample is None for sample in samples):
            return False
        if all(sample.reference_logprobs is not None for sample in samples):
            return True
        return (work.config.filter_zero_variance and all(sample.scored for sample in samples)
                and not has_signal([sample.reward for sample in samples]))

    return [prompt.group.group_index for prompt in work.prompts if not needless(prompt)]


def in_company(work: IterationWork, indices: Iterable[int]) -> list[Prompt]:
    """Prompts of these groups, and of those that go through a prefix with them: made for some only, or once more, it is the same
    to the last bit."""
    return [work.prompts[index] for index in companions(indices, len(work.prompts), work.config.groups_per_pass)]


async def prefix(work: IterationWork, group: EngineGroup, span: str, order: Callable[..., orders.Order],
                 prompts: Sequence[Prompt], phase: Phase = Phase.OVERLAP) -> None:
    with work.timeline.span(phase, span):
        outcomes = await group.command(order([prompt.group for prompt in prompts]), work.place())
        for rank, outcome in enumerate(outcomes):
            own = [prompt for prompt in prompts
                   if group.replicas.of_group(prompt.group.group_index) == group.replicas.of_rank(rank)]
            check_hashes(group.role, own, outcome.value.prompt_hashes)


def check_hashes(role: str, prompts: Sequence[Prompt], hashes: Sequence[str]) -> None:
    """Every engine must have seen the same token ids, grids and timing."""
    for prompt, found in zip(prompts, hashes, strict=True):
        if found != prompt.group.prompt_hash:
            raise DataLoss(f"{role} read another prompt {prompt.group.group_index} than the coordinator: hash {found}, "
                           f"expected {prompt.group.prompt_hash}", reason="PROMPT_MISMATCH")
