"""What an iteration will need of each device, from its prompts, the run's options and what the engines say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollplex.core.config import MeshSection, RunConfig
from rollplex.core.hbm_shares import EngineChoices
from rollplex.core.memory_plan import Choice, Plan, make_plan
from rollplex.core.memory_sizes import PlanInput, Work
from rollplex.core.phases import Phase
from rollplex.core.residency import RUNTIME, PlannedBytes
from rollplex.core.shapes import ModelShapes, VisionShapes
from rollplex.core.work import MediaItem
from rollplex.v1.phase_service_pb2 import JoinResponse

UNLIMITED = 1 << 60
OF_ROLLOUT = frozenset({"actor_snapshot", "rollout_kv", RUNTIME})


@dataclass(frozen=True, slots=True)
class IterationNeeds:
    """What `Mesh.enter_phase` tells the broker. The default tells nothing."""

    plan: Plan | None = None
    left_out: frozenset[str] = field(default_factory=frozenset)
    """Classes that this iteration has nothing of."""

    def planned(self, phase: Phase) -> list[PlannedBytes]:
        return [] if self.plan is None else self.plan.planned(phase, self.left_out)

    @property
    def relaxed(self) -> tuple[str, ...]:
        return () if self.plan is None else self.plan.relaxed


@dataclass(frozen=True, slots=True)
class Planner:
    """One mesh's."""

    mesh: MeshSection
    shapes: ModelShapes
    dtype: str

    def needs(self, config: RunConfig, prompt_tokens: Sequence[int], choices: EngineChoices, *, generates: bool,
              trains: bool, response_tokens: int = 0, media: Sequence[Sequence[MediaItem]] = ()) -> IterationNeeds:
        """`prompt_tokens`, `media`: of each prompt. `response_tokens`: mean of the longest micro-batch, once responses are fixed;
        0: all may be as long as the run lets them. An iteration that replays generates nothing, a validation trains nothing."""
        budget = self.mesh.hbm_budget_bytes
        visual = [sum(visual_tokens(self.shapes.vision, item) for item in items) for items in media]
        samples = config.sampling.samples_per_group
        work = Work(groups=len(prompt_tokens), samples=samples, prompt_tokens=-(-sum(prompt_tokens) // len(prompt_tokens)),
                    longest_prompt_tokens=max(prompt_tokens),
                    visual_tokens=-(-sum(visual) // len(visual)) if visual else None,
                    longest_visual_tokens=max(visual, default=None),
                    response_tokens=response_tokens or config.sampling.max_response_tokens,
                    micro_batch_samples=config.suffix_micro_batch_samples or samples,
                    chunk_elements=config.optimizer.chunk_elements)
        rates = config.optimizer.module_learning_rates()
        given = PlanInput(
            shapes=self.shapes, topology=self.mesh.topology, gpus=self.mesh.topology.train_tp,
            rollout_gpus=self.mesh.topology.replica_count * self.mesh.topology.rollout_tp,
            hbm_bytes=budget or UNLIMITED, host_bytes=UNLIMITED, runtime_bytes=self.mesh.hbm_runtime_bytes, work=work,
            schedule=config.schedule, dtype=self.dtype, reference=config.loss.kl_coef > 0, freeze_vision=rates["vision"] == 0,
            freeze_decoder=rates["decoder"] == 0, reference_ranks=self.mesh.reference_tensor_parallel,
            data_parallel=self.mesh.data_parallel,
            kv_pool_bytes=choices.kv_pool_bytes, ablation=config.ablation)
        plan = make_plan(given, Choice(**choices.as_plan(), activations=config.saved_activations,
                                       suffix_activations=config.suffix_activations))
        without = set() if trains else {name for column in plan.columns for name in column.hbm} - OF_ROLLOUT
        # Without a pool of a fixed size rollout takes what is there, and no more.
        if not generates or not (choices.kv_pool_bytes or budget):
            without.add("rollout_kv")
        return IterationNeeds(plan, frozenset(without))


def visual_tokens(vision: VisionShapes, item: MediaItem) -> int:
    """Of one medium, whose frames the decoder has brought to the size in which the model sees them."""
    frames, height, width, _ = item.frames.shape
    side = vision.patch_size * vision.spatial_merge_size
    steps = -(-frames // vision.temporal_patch_size)
    return steps * -(-height // side) * -(-width // side)


def longest_micro_batch(groups: Sequence[Sequence[int]], micro_batch_samples: int, replicas: int = 1) -> int:
    """Mean tokens of a response, rounded up, of the suffix forward that has most of them. `groups`: the lengths of each group's
    responses, by index; `micro_batch_samples`: RunConfig.suffix_micro_batch_samples; `replicas` share a pass's groups out."""
    if not groups:
        return 0
    largest = max(map(len, groups))
    size = micro_batch_samples or largest
    together = max(1, min(size // largest, len(groups)))
    if together == 1:
        parts = [sum(lengths[start:start + size]) for lengths in groups for start in range(0, len(lengths), size)]
        return -(-max(parts) // min(size, largest))
    tokens: dict[tuple[int, int], int] = defaultdict(int)
    for index, lengths in enumerate(groups):
        tokens[index // together, index % replicas] += sum(lengths)
    return -(-max(tokens.values()) // (-(-together // replicas) * largest))


def engine_choices(joined: Iterable[JoinResponse]) -> EngineChoices:
    """What the engines said when they joined, in one; what none speaks of is as EngineChoices has it."""
    residency: dict[str, str] = {}
    pool_bytes = 0
    for answer in joined:
        residency.update(answer.residency)
        pool_bytes = max(pool_bytes, answer.kv_pool_bytes)
    known = EngineChoices()
    return EngineChoices(residency.get("gradients", known.gradients), residency.get("reference_weights", known.reference),
                         pool_bytes)
