"""What each GPU would hold if nothing were shared, released or parked: the paper's Table 1."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollplex.core.memory_sizes import PlanInput, Sizes


class Source(StrEnum):
    MODEL = "model"
    """Counted from the shapes."""
    WORK = "work"
    """From prompts, responses and their lengths."""
    ESTIMATE = "estimate"
    """Depends on settings that the plan does not know."""
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class NaiveRow:
    role: str
    component: str
    language_bytes: int
    tower_bytes: int
    """What the vision tower, whole on every GPU, adds."""
    source: Source
    nominal_bytes: int | None = None
    """Of the language model at the size its publisher states; only for rows that grow with parameters."""

    @property
    def size_bytes(self) -> int:
        return self.language_bytes + self.tower_bytes


def naive_overlap(given: PlanInput) -> list[NaiveRow]:
    sizes, layout, topology = Sizes(given), given.layout, given.topology
    nominal = given.shapes.nominal_parameters
    language, tower = layout.language_total, layout.vision_total
    work = given.work

    def weights(role: str, component: str, item: int, tp: int, *, trained: bool = False) -> NaiveRow:
        elements = ("training_elements", "rollout_elements")[role == "rollout"]
        frozen = trained and given.freeze_vision
        return NaiveRow(role, component, getattr(language, elements) * item,
                        0 if frozen else getattr(tower, elements) * item, Source.MODEL,
                        nominal * item // tp if nominal else None)

    train, roll, state, moments = topology.train_tp, topology.rollout_tp, sizes.state_item, sizes.moments // max(
        1, sizes.trainable)
    boundaries = sizes.boundary * (2 if given.reference else 1)
    tokens = work.prompt_tokens + work.packed_samples * work.response_tokens
    one_prompt = sizes.layer_inputs // sizes.groups_per_rank
    tower_inputs = 0 if given.freeze_vision else one_prompt - work.prompt_tokens * (
        given.shapes.layer_count * given.shapes.hidden_size * sizes.item)
    activations = one_prompt - tower_inputs + sizes.suffix_activations("recompute") + sizes.layer_working_set(tokens)
    rows = [
        weights("training actor", f"{given.dtype} weights", sizes.item, train),
        weights("training actor", "gradient buffer", state, train, trained=True),
        weights("training actor", "master weights", state, train, trained=True),
        weights("training actor", "Adam moments", moments, train, trained=True),
        NaiveRow("training actor", "activations (one micro-batch)", activations, tower_inputs, Source.ESTIMATE),
        NaiveRow("training actor", "preserved prefix KV (all boundaries)", boundaries, 0, Source.WORK),
        weights("reference", f"{given.dtype} weights", sizes.item, train),
        weights("rollout", f"{given.dtype} weights", sizes.item, roll),
        NaiveRow("rollout", "KV cache (of all samples at once)", sizes.rollout_kv, 0, Source.WORK),
        NaiveRow("rollout", "runtime buffers", given.runtime_bytes, 0, Source.GIVEN),
    ]
    return [row for row in rows if given.reference or row.role != "reference"]


UNDETERMINED = {
    "activations (one micro-batch)": "depends on what is recomputed and on the micro-batch: an estimate for checkpointed layers",
    "KV cache (of all samples at once)": "an engine's pool is a setting: what these prompts and responses need",
    "runtime buffers": "contexts, NCCL and engine buffers are not known from a config: --runtime-gib",
}
"""Rows of the paper's Table 1 that a config and an iteration's lengths do not determine, and why."""
