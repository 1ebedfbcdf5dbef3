"""How many bytes each object class takes on a GPU or its host, from shapes, degrees and the work of an iteration.

Legend: P prompt tokens, R response tokens, N samples a group, D hidden, H query heads, K kv heads, d head size, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from rollplex.core.aliasing import AliasCase
from rollplex.core.config import ONE_CHUNK, AblationConfig
from rollplex.core.errors import BadInput
from rollplex.core.model_layout import SPLIT, LayoutSummary, summarise
from rollplex.core.placement import ITEM_BYTES
from rollplex.core.shapes import ModelShapes
from rollplex.core.topology import Topology

GIB = 1 << 30
PIPELINE_CHUNKS = 3
"""Load, update and write-back: chunks of the streamed update that are under way at once."""
LOGIT_CHUNK_TOKENS = 1024
PLAN_SCHEDULES = ("serial", "overlap", "disaggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One iteration."""

    groups: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_samples: int
    """Responses in one suffix forward."""
    chunk_elements: int = 1 << 24
    longest_prompt_tokens: int = 0
    """Of one prompt, where `prompt_tokens` is a mean; 0: all are alike."""

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "prompt_tokens", "response_tokens", "micro_batch_samples", "chunk_elements"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be at least 1", reason="BAD_PLAN")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What is planned for. Bytes of a GPU and of a node; `host_bytes` is what slabs may take."""

    shapes: ModelShapes
    topology: Topology
    gpus: int
    """Of the node that trains."""
    hbm_bytes: int
    host_bytes: int
    runtime_bytes: int
    work: Work
    schedule: str = "overlap"
    rollout_gpus: int | None = None
    train_layout: str = SPLIT
    dtype: str = "bfloat16"
    reference: bool = True
    freeze_vision: bool = False
    freeze_decoder: bool = False
    moments_dtype: str = "float32"
    kv_pool_bytes: int = 0
    """Of a GPU: what rollout sets aside for keys and values whatever its samples need; 0: what the samples need."""
    ablation: AblationConfig = field(default_factory=AblationConfig)

    def __post_init__(self) -> None:
        if self.schedule not in PLAN_SCHEDULES:
            raise BadInput(f"schedule {self.schedule!r} is none of {', '.join(PLAN_SCHEDULES)}", reason="BAD_PLAN")
        for name, devices, tp in (("gpus", self.gpus, self.topology.train_tp),
                                  ("rollout_gpus", self.rollout_devices, self.topology.rollout_tp)):
            if devices < 1 or devices % tp:
                raise BadInput(f"{name} is {devices}; it must be a positive multiple of TP {tp}", reason="BAD_PLAN")
        for name in ("hbm_bytes", "host_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be at least 1", reason="BAD_PLAN")

    @property
    def rollout_devices(self) -> int:
        return self.gpus if self.rollout_gpus is None or self.schedule != "disaggregated" else self.rollout_gpus

    @property
    def layout(self) -> LayoutSummary:
        return summarise(self.shapes, self.topology, self.train_layout, self.dtype)


@dataclass(frozen=True)
class Sizes:
    """Bytes on one GPU (or for one GPU, on its host)."""

    given: PlanInput

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.given.dtype]

    @property
    def state_item(self) -> int:
        """Of master weights, gradients and full-precision moments."""
        return max(4, self.item)

    @property
    def chunk_elements(self) -> int:
        return ONE_CHUNK if self.given.ablation.unchunked_optimizer else self.given.work.chunk_elements

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(self.given.work.longest_prompt_tokens, self.given.work.prompt_tokens)

    @cached_property
    def trainable(self) -> int:
        given = self.given
        return ((not given.freeze_decoder) * given.layout.language_total.training_elements
                + (not given.freeze_vision) * given.layout.vision_total.training_elements)

    @cached_property
    def training_weights(self) -> int:
        layout = self.given.layout
        return (layout.language_total + layout.vision_total).training_elements * self.item

    @cached_property
    def rollout_weights(self) -> int:
        layout = self.given.layout
        return (layout.language_total + layout.vision_total).rollout_elements * self.item

    @cached_property
    def shared_snapshot(self) -> int:
        """Rollout's slab, and what training must hold apart of the tensors that are rebuilt in it."""
        layout = self.given.layout
        apart = layout.language[AliasCase.INCOMPATIBLE] + layout.vision[AliasCase.INCOMPATIBLE]
        return self.rollout_weights + apart.training_elements * self.item

    @property
    def gradients(self) -> int:
        return self.trainable * self.state_item

    @property
    def master(self) -> int:
        return self.trainable * self.state_item

    @property
    def moments(self) -> int:
        return 2 * self.trainable * (ITEM_BYTES["bfloat16"] if self.given.moments_dtype == "bfloat16" else self.state_item)

    @property
    def spare_slots(self) -> int:
        """Beside master and moments, so that a chunk is never overwritten in place."""
        return PIPELINE_CHUNKS * 3 * min(self.chunk_elements, self.trainable) * self.state_item

    @property
    def update_window(self) -> int:
        """FP32 state in HBM during the streamed update."""
        return min(PIPELINE_CHUNKS * 3 * self.chunk_elements * self.state_item, self.master + self.moments)

    @property
    def gradient_window(self) -> int:
        """Spilled gradients in HBM."""
        return min(PIPELINE_CHUNKS * self.chunk_elements * self.state_item, self.gradients)

    def kv_token(self, tp: int) -> int:
        """Keys and values of one token on a rank, all layers."""
        shapes = self.given.shapes
        return 2 * shapes.layer_count * max(1, shapes.kv_head_count // tp) * shapes.head_size * self.item

    @property
    def groups_per_rank(self) -> int:
        """Prompts that one training group works through."""
        return -(-self.given.work.groups // (self.given.gpus // self.given.topology.train_tp))

    @property
    def boundary(self) -> int:
        """One role's keys and values of all prompts."""
        return self.groups_per_rank * self.given.work.prompt_tokens * self.kv_token(self.given.topology.train_tp)

    @property
    def boundary_gradients(self) -> int:
        """Of the group whose suffixes are in work."""
        return self.longest_prompt * self.kv_token(self.given.topology.train_tp)

    @property
    def group_kv(self) -> int:
        """Rollout's KV of one group: its prompt once, its responses at full length. Less cannot be decoded."""
        work = self.given.work
        return (work.prompt_tokens + work.samples * work.response_tokens) * self.kv_token(self.given.topology.rollout_tp)

    @property
    def rollout_kv(self) -> int:
        """Of all groups of a replica at once."""
        return -(-self.given.work.groups // (self.given.rollout_devices // self.given.topology.rollout_tp)) * self.group_kv

    @property
    def layer_inputs(self) -> int:
        """What checkpointing keeps of all prompts, as if every prompt token were a visual one."""
        return self.groups_per_rank * self._inputs(self.given.work.prompt_tokens, vision=not self.given.freeze_vision)

    @property
    def full_tape(self) -> int:
        """Every activation of all prompts' decoder layers: half of a layer's working set is its forward's."""
        work, shapes = self.given.work, self.given.shapes
        return self.layer_inputs + self.groups_per_rank * shapes.layer_count * self.layer_working_set(work.prompt_tokens) // 2

    def prefix_waiting(self, activations: str) -> int:
        """What stays in HBM of the prefixes until their backward pass."""
        return {"keep": self.full_tape, "recompute": self.layer_inputs}.get(activations, 0)

    def prefix_backward(self, activations: str) -> int:
        """What one prompt's backward pass adds: a layer's working set, and its layer inputs where all of it runs again."""
        again = self.layer_inputs // self.groups_per_rank if activations == "from_inputs" else 0
        return again + self.prefix_working_set

    @property
    def suffix_activations(self) -> int:
        """Layer inputs of one micro-batch, one layer's working set, and the logits of one chunk of tokens with their
        gradient, in float32."""
        work, topology = self.given.work, self.given.topology
        tokens = work.micro_batch_samples * work.response_tokens
        vocab = self.given.shapes.padded_vocab(topology.train_tp) // topology.train_tp
        return (self._inputs(tokens, vision=False) + self.layer_working_set(tokens)
                + 3 * min(tokens, LOGIT_CHUNK_TOKENS) * vocab * self.state_item)

    @property
    def prefix_working_set(self) -> int:
        """One layer of one prompt, forward and backward."""
        return self.layer_working_set(self.longest_prompt)

    @property
    def media(self) -> int:
        """Decoded frames of an iteration and of the queued one, as if every prompt token were a visual one; per node."""
        vision, work = self.given.shapes.vision, self.given.work
        token = (vision.spatial_merge_size * vision.patch_size)**2 * vision.temporal_patch_size * vision.in_channels
        return 2 * work.groups * work.prompt_tokens * token

    def _inputs(self, tokens: int, *, vision: bool) -> int:
        shapes, tower = self.given.shapes, self.given.shapes.vision
        patches = tower.depth * tower.hidden_size * tower.spatial_merge_size**2 if vision else 0
        return tokens * (shapes.layer_count * shapes.hidden_size + patches) * self.item

    def layer_working_set(self, tokens: int) -> int:
        """An estimate: norms, projections, attention and MLP of one layer and their gradients, cut where TP cuts them."""
        shapes, tp = self.given.shapes, self.given.topology.train_tp
        heads = (shapes.head_count + 2 * shapes.kv_head_count) * shapes.head_size
        return tokens * self.item * (8 * shapes.hidden_size + (4 * heads + 6 * shapes.intermediate_size) // tp)
