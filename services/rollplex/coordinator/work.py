"""Everything that one iteration or validation works with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollplex.coordinator.intake import Intake, Prompt
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.mesh import NOTHING, Mesh
from rollplex.coordinator.peers import Place
from rollplex.coordinator.planner import IterationNeeds, longest_micro_batch
from rollplex.coordinator.records import EventBody, IterationKey, Run, SampleRecord
from rollplex.coordinator.recovery import Recovery
from rollplex.coordinator.rewards import RewardDesk
from rollplex.coordinator.timeline import Timeline
from rollplex.core.config import RunConfig
from rollplex.core.errors import InternalError
from rollplex.core.phases import Phase, PhaseEvent, next_phase


@dataclass(slots=True)
class IterationWork:
    """One that goes on after a coordinator's death begins with what the journal has of it."""

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
    former: dict[tuple[int, int], SampleRecord] = field(default_factory=dict)
    """Samples of groups that are generated again; one that comes out the same keeps its score."""
    timeline: Timeline = None
    recovery: Recovery = None
    metrics: dict[str, float] = field(default_factory=dict)
    resumed: bool = False
    """An earlier coordinator began it; engines may still hold what it left."""
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
        self.recovery = Recovery(self.mesh, self.run, self.config, self.emit)

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
        """Through a barrier: the table says where to, the broker checks what is held. What a lost service that was left behind
        still holds is waited out."""
        self.phase = next_phase(self.phase, event)
        try:
            await self._enter()
        except InternalError as error:
            if error.reason != "RESIDENCY_VIOLATED" or not (groups := await self.recovery.spared_back()):
                raise
            for group in groups:
                await self.mesh.let_go(group, self.place(), leave_snapshot=False)
            await self._enter()

    async def _enter(self) -> None:
        await self.recovery.survive(None, lambda: self.mesh.enter_phase(
            self.run.name, self.key.iteration, self.phase, self.needs), what=lambda: f"entering {self.phase.name}")

    def plan(self) -> None:
        """After the mesh is ready, and again when the responses are fixed."""
        prompts = [len(prompt.group.token_ids) for prompt in self.prompts]
        responses = [[len(sample.token_ids) for sample in samples] for samples in self.by_group().values()]
        self.needs = self.mesh.needs(
            self.config, prompts, generates=self.recorded is None, trains=not self.key.validation,
            media=[prompt.group.media for prompt in self.prompts],
            response_tokens=longest_micro_batch(responses, self.config.suffix_micro_batch_samples,
                                                self.mesh.trainer.replicas.count))

    def by_group(self) -> dict[int, list[SampleRecord]]:
        groups: dict[int, list[SampleRecord]] = defaultdict(list)
        for _, sample in sorted(self.samples.items()):
            groups[sample.group_index].append(sample)
        return groups

    def incomplete(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of which not every sample has finished."""
        def missing(prompt: Prompt) -> bool:
            samples = (self.samples.get((prompt.group.group_index, index)) for index in range(prompt.group.sample_count))
            return any(sample is None or not sample.whole for sample in samples)

        return [prompt for prompt in prompts if missing(prompt)]

    async def set_aside(self, prompts: Sequence[Prompt]) -> None:
        """Takes back what there is of groups that are generated whole once more."""
        groups = {prompt.group.group_index for prompt in prompts}
        found = {key: sample for key, sample in self.samples.items() if key[0] in groups}
        if not found:
            return
        for key, sample in found.items():
            del self.samples[key]
            if sample.whole:
                self.former[key] = sample
        await self.journal.delete_groups(self.key, sorted({group for group, _ in found}))
