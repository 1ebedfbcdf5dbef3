"""[run]: what a job computes; [run.sampling], [run.loss], [run.optimizer] and [run.ablation] have files of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollplex.core.config.ablation import AblationConfig
from rollplex.core.config.checks import check_at_least, check_one_of
from rollplex.core.config.loss import LossConfig
from rollplex.core.config.optimizer import OptimizerConfig
from rollplex.core.config.sampling import SamplingConfig

SCHEDULES = ("serial", "overlap", "disaggregated")
SAVED_MODES = ("keep", "recompute", "offload", "from_inputs")
SUFFIX_MODES = ("keep", "recompute")
ONE_CHUNK = 1 << 40
"""Elements; more than any model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run computes. The same config and prompts give the same updates."""

    schedule: str = "overlap"
    """The same update in another order: `serial`, phases one after the other; `overlap`, prefixes beside decode;
    `disaggregated`, as serial with rollout on devices of its own (mesh.own_replicas)."""
    deterministic: bool = False
    """Groups one at a time, in index order: on CPU, iterations of the same numbers and prompts give bit-identical snapshots
    under any schedule, whatever was restarted between them."""
    seed: int = 0
    saved_activations: str = "keep"
    """What the trainer's prefix leaves for backward: `keep` (every activation), `recompute` (layer inputs), `offload` (layer
    inputs, in the host pool) or `from_inputs` (nothing but the prompt, from which the prefix runs again)."""
    suffix_activations: str = "keep"
    """What a suffix forward leaves for its backward: `keep` (every activation) or `recompute` (layer inputs). The gradients are
    the same to the last bit."""
    replay: str = ""
    """Name of a recorded run: its prompts, responses (token ids) and rewards are trained on again, iteration by iteration, and
    rollout generates nothing. Options that are not given are those of the recorded run."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal (DAPO's dynamic sampling without refill); counted either way."""
    suffix_micro_batch_samples: int = 0
    """Samples in one suffix forward: fewer than a group has are parts of it. Twice as many or more are several whole groups,
    whose prompts go through one prefix together, too: fewer launches for the host, more memory on the device; those of all
    replicas with mesh.data_parallel. 0: a group."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ablation: AblationConfig = field(default_factory=AblationConfig)
    phase_timeout_s: float = 1800.0
    """Deadline of each phase, and of writing a checkpoint. Where a service was lost, counted again from when it is back."""
    recovery_timeout_s: float = 300.0
    """How long an iteration waits for a service that was lost before it ends; after UPDATE_BEGIN it waits until it is back."""
    checkpoint_every: int = 0
    """Iterations between durable checkpoints (docs/checkpoints.md), written while the next iteration runs; 0: none."""
    checkpoint_keep: int = 2
    """Checkpoints of the run that stay; older ones are deleted."""

    def __post_init__(self) -> None:
        check_one_of("schedule", self.schedule, SCHEDULES)
        check_one_of("saved_activations", self.saved_activations, SAVED_MODES)
        check_one_of("suffix_activations", self.suffix_activations, SUFFIX_MODES)
        check_at_least("suffix_micro_batch_samples", self.suffix_micro_batch_samples, 0)
        check_at_least("checkpoint_every", self.checkpoint_every, 0)
        check_at_least("checkpoint_keep", self.checkpoint_keep, 1)
        for name in ("phase_timeout_s", "recovery_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def groups_per_pass(self) -> int:
        """Groups that go through prefix and suffix together (core.packs)."""
        return max(1, self.suffix_micro_batch_samples // self.sampling.samples_per_group)

    @property
    def streamed_optimizer(self) -> OptimizerConfig:
        """`optimizer` as the update takes it: cut into chunks, unless that is ablated."""
        return replace(self.optimizer, chunk_elements=ONE_CHUNK) if self.ablation.unchunked_optimizer else self.optimizer
