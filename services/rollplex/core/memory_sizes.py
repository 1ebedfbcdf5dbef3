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
WORKSPACE_ROWS = 3
"""Of AdamW at once, as long as a chunk each (trainer/chunk_pipeline.py)."""
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
    """Responses in one suffix forward, at most: parts of a group, or several whole ones."""
    chunk_elements: int = 1 << 24
    longest_prompt_tokens: int = 0
    """Of one prompt, where `prompt_tokens` is a mean; 0: all are alike."""
    visual_tokens: int | None = None
    """Of a prompt, as `prompt_tokens` is; None: every one is visual, which is the most that the tower can ask for."""
    longest_visual_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "prompt_tokens", "response_tokens", "micro_batch_samples", "chunk_elements"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it must be at least 1", reason="BAD_PLAN")

    @property
    def packed_groups(self) -> int:
        """Groups in one suffix forward, and their prompts in one prefix."""
        return max(1, min(self.micro_batch_samples // self.samples, self.groups))

    @property
    def packed_samples(self) -> int:
        """Responses in one suffix forward."""
        return min(self.micro_batch_samples, self.packed_groups * self.samples)

    @property
    def visual(self) -> int:
        """Visual tokens of a prompt."""
        return self.prompt_tokens if self.visual_tokens is None else self.visual_tokens

    @property
    def longest_visual(self) -> int:
        """Of the prompt that has most."""
        if self.longest_visual_tokens is not None:
            return self.longest_visual_tokens
        return max(self.prompt_tokens, self.longest_prompt_tokens)


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
    reference_ranks: int = 0
    """Of the reference, which sits on the first GPUs of a training group; 0: as many as training's."""
    data_parallel: bool = False
    """MeshSection.data_parallel: the replicas of a training group share its prompts out."""
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
    def chunks_under_way(self) -> int:
        return min(PIPELINE_CHUNKS, -(-self.trainable // self.chunk_elements))

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

    @property
    def tp(self) -> int:
        """Ranks of the trainer that compute a prompt together."""
        topology = self.given.topology
        return topology.rollout_tp if self.given.data_parallel else topology.train_tp

    @property
    def reference_ranks(self) -> int:
        return self.given.reference_ranks or self.given.topology.train_tp

    @property
    def reference_tp(self) -> int:
        """Ranks of the reference that compute a prompt together."""
        ranks = self.reference_ranks
        return min(self.given.topology.rollout_tp, ranks) if self.given.data_parallel else ranks

    @cached_property
    def reference_weights(self) -> int:
        """Of one of the reference's ranks."""
        if self.reference_tp == self.given.topology.train_tp:
            return self.training_weights
        topology = Topology(self.reference_tp, self.reference_tp)
        layout = summarise(self.given.shapes, topology, self.given.train_layout, self.given.dtype)
        return (layout.language_total + layout.vision_total).training_elements * self.item

    @property
    def reference_boundary(self) -> int:
        """Of one of the reference's ranks: keys and values of its prompts."""
        groups = self._groups_of(self.reference_ranks // self.reference_tp)
        return groups * self.given.work.prompt_tokens * self.kv_token(self.reference_tp)

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
        """Where replicas share prompts out, also of the parameters that their own state is not of."""
        given, topology = self.given, self.given.topology
        others = topology.q - 1 if given.data_parallel and not given.freeze_decoder else 0
        return (self.trainable + others * given.layout.language_total.training_elements) * self.state_item

    @property
    def master(self) -> int:
        return self.trainable * self.state_item

    @property
    def moments(self) -> int:
        return 2 * self.trainable * (ITEM_BYTES["bfloat16"] if self.given.moments_dtype == "bfloat16" else self.state_item)

    @property
    def spare_slots(self) -> int:
        """Beside master and moments, so that a chunk is never overwritten in place."""
        return 3 * self.chunks_under_way * min(self.chunk_elements, self.trainable) * self.state_item

    @property
    def update_window(self) -> int:
        """FP32 state in HBM during the streamed update: of the chunks under way, and AdamW's temporaries of one."""
        return (3 * self.chunks_under_way + WORKSPACE_ROWS) * min(self.chunk_elements, self.trainable) * self.state_item

    @property
    def gradient_window(self) -> int:
        """Spilled gradients in HBM."""
        return self.chunks_under_way * min(self.chunk_elements, self.trainable) * self.state_item

    def kv_token(self, tp: int) -> int:
        """Keys and values of one token on a rank, all layers."""
        shapes = self.given.shapes
        return 2 * shapes.layer_count * max(1, shapes.kv_head_count // tp) * shapes.head_size * self.item

    @property
    def groups_per_rank(self) -> int:
        """Prompts that a rank of the trainer works on."""
        return self._groups_of(self.given.topology.train_tp // self.tp)

    def _groups_of(self, replicas: int) -> int:
        """Of a training group's prompts, where so many replicas share them out."""
        return -(-self.given.work.groups // (self.given.gpus // self.given.topology.train_tp * replicas))

    @property
    def packed_prompts(self) -> int:
        """Of those that go through a pass together, a rank's: replicas share them out."""
        return -(-self.given.work.packed_groups // (self.given.topology.train_tp // self.tp))

    @property
    def boundary(self) -> int:
        """One role's keys and values of all prompts."""
        return self.groups_per_rank * self.given.work.prompt_tokens * self.kv_token(self.tp)

    @property
    def boundary_gradients(self) -> int:
        """Of the groups whose suffixes are in work."""
        return self.packed_prompts * self.longest_prompt * self.kv_token(self.tp)

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
        """What checkpointing keeps of all prompts: inputs of the decoder's layers, of the tower's, and of its merger."""
        work = self.given.work
        return self.groups_per_rank * (self._inputs(work.prompt_tokens) + self._tower_inputs(work.visual))

    @property
    def full_tape(self) -> int:
        """Every activation of all prompts."""
        work, shapes = self.given.work, self.given.shapes
        tower = 0
        if not self.given.freeze_vision:
            tower = shapes.vision.depth * self._tower_layer_kept(work.visual) + self._merger_kept(work.visual)
        return self.groups_per_rank * (shapes.layer_count * self._layer_kept(work.prompt_tokens, self.packed_prompts) + tower)

    @property
    def patches(self) -> int:
        """Of all prompts, in the model's type, as the tower's first matrix keeps them for its own gradient."""
        return 0 if self.given.freeze_vision else self.groups_per_rank * self._patches(self.given.work.visual)

    def _patches(self, visual: int) -> int:
        """Of so many visual tokens."""
        vision = self.given.shapes.vision
        patch = vision.patch_size**2 * vision.temporal_patch_size * vision.in_channels
        return visual * vision.spatial_merge_size**2 * patch * self.item

    def prefix_waiting(self, activations: str) -> int:
        """What stays in HBM of the prefixes until their backward pass. Where all of it runs again the prompts wait: patches, and
        tokens with their three positions in 64 bits."""
        work = self.given.work
        prompts = self.groups_per_rank * (self._patches(work.visual) + work.prompt_tokens * 4 * 8)
        return {"keep": self.full_tape + self.patches, "recompute": self.layer_inputs + self.patches, "offload": self.patches,
                "from_inputs": prompts}[activations]

    def prefix_backward(self, activations: str) -> int:
        """What the backward pass of the longest prompts adds: a layer's working set, and where all of it runs again their layer
        inputs. The patches of one prompt are there (but of one with images and videos), those of several are put in a row."""
        visual = self.given.work.longest_visual
        again = self._inputs(self.longest_prompt) + self._tower_inputs(visual)
        if self.packed_prompts > 1 and not self.given.freeze_vision:
            again += self._patches(visual)
        return self.prefix_working_set + self.packed_prompts * again * (activations == "from_inputs")

    def suffix_activations(self, saved: str) -> int:
        """Of one micro-batch: layer inputs (`keep`: every activation, the boundaries' keys and values beside the own), the
        last norm, one layer's working set and one chunk of logits."""
        work, shapes = self.given.work, self.given.shapes
        tokens = min(work.packed_samples, self.packed_prompts * work.samples) * work.response_tokens
        kept = self._inputs(tokens)
        if saved == "keep":
            boundary = self.packed_prompts * work.prompt_tokens * self.kv_token(self.tp)
            kept = shapes.layer_count * self._layer_kept(tokens) + boundary
        return kept + tokens * self._norm_kept(shapes.hidden_size) + self.layer_working_set(tokens) + self.logits(tokens)

    def logits(self, tokens: int) -> int:
        """Of one chunk of so many tokens, with their gradient, in float32."""
        rows = self.given.shapes.padded_vocab(self.given.topology.train_tp) // self.tp
        return 3 * min(tokens, LOGIT_CHUNK_TOKENS) * rows * self.state_item

    @property
    def prefix_working_set(self) -> int:
        """One layer of the prompts of a pass, forward and backward: the decoder's or the tower's, which one rank may compute
        whole."""
        tokens, vision = self.packed_prompts * self.given.work.longest_visual, self.given.shapes.vision
        patches = tokens * vision.spatial_merge_size**2
        gradients = patches * self.item * (2 * vision.hidden_size + 3 * vision.intermediate_size)
        tower = 0 if self.given.freeze_vision else max(self._tower_layer_kept(tokens), self._merger_kept(tokens)) + gradients
        return max(self.layer_working_set(self.packed_prompts * self.longest_prompt, self.packed_prompts), tower)

    @property
    def reference_prefix(self) -> int:
        """What the reference's prefix works with in a layer, without a graph: of every prompt of a pass but one, whose share is
        the runtime's. Of the decoder or the tower, which one rank may compute whole: four hidden states (input, attention's
        output, their sum, its norm), and of the MLP gate, up and their product."""
        given, vision = self.given, self.given.shapes.vision
        prompts = -(-given.work.packed_groups // (self.reference_ranks // self.reference_tp))
        decoder = self.longest_prompt * (4 * given.shapes.hidden_size + 3 * given.shapes.intermediate_size // self.reference_tp)
        patches = given.work.longest_visual * vision.spatial_merge_size**2
        return (prompts - 1) * max(decoder, patches * (4 * vision.hidden_size + 3 * vision.intermediate_size)) * self.item

    @property
    def media(self) -> int:
        """Decoded frames of an iteration and of the queued one; per node."""
        vision, work = self.given.shapes.vision, self.given.work
        token = (vision.spatial_merge_size * vision.patch_size)**2 * vision.temporal_patch_size * vision.in_channels
        return 2 * work.groups * work.visual * token

    def _inputs(self, tokens: int) -> int:
        """Of the decoder's layers."""
        return tokens * self.given.shapes.layer_count * self.given.shapes.hidden_size * self.item

    def _tower_inputs(self, tokens: int) -> int:
        tower = self.given.shapes.vision
        if self.given.freeze_vision:
            return 0
        return tokens * (tower.depth + 1) * tower.hidden_size * tower.spatial_merge_size**2 * self.item

    def layer_working_set(self, tokens: int, prompts: int = 1) -> int:
        """What one decoder layer saves for its backward, and the gradients of its MLP, which are the most at once. `prompts`: in
        a row."""
        shapes, tp = self.given.shapes, self.tp
        gradients = 2 * shapes.hidden_size + 3 * shapes.intermediate_size // tp
        return self._layer_kept(tokens, prompts) + tokens * self.item * gradients

    def _layer_kept(self, tokens: int, prompts: int = 1) -> int:
        """What a decoder layer saves, cut where TP cuts it: of each norm the input in float32 and two outputs; queries, attention
        output (of several prompts once each and once in a row), keys and values; of the MLP gate, its activation, up and their
        product. As counted by trainer.saved_bytes."""
        shapes, tp = self.given.shapes, self.tp
        queries = 2 if prompts == 1 else 3
        heads = queries * shapes.head_count * shapes.head_size + 2 * max(tp, shapes.kv_head_count) * shapes.head_size
        return tokens * (2 * self._norm_kept(shapes.hidden_size) + self.item * ((heads + 4 * shapes.intermediate_size) // tp))

    def _tower_layer_kept(self, tokens: int) -> int:
        """The same of a layer of the vision tower for so many visual tokens; whole, since one rank computes all of an image."""
        vision = self.given.shapes.vision
        patches = tokens * vision.spatial_merge_size**2
        elements = 6 * vision.hidden_size + 4 * vision.intermediate_size
        return patches * (2 * self._norm_kept(vision.hidden_size) + self.item * elements)

    def _merger_kept(self, tokens: int) -> int:
        """Of the norm as of any; of the MLP, which is as wide as it gets, what goes into its activation and comes out."""
        vision = self.given.shapes.vision
        patches = tokens * vision.spatial_merge_size**2
        return patches * (self._norm_kept(vision.hidden_size) + 2 * self.item * vision.hidden_size)

    def _norm_kept(self, width: int) -> int:
        return width * (self.state_item + 2 * self.item)
