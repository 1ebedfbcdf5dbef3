"""The alias class of every tensor of a model at a pair of tensor-parallel degrees, and what that adds up to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from rollplex.core.aliasing import AliasCase, Aliasing, classify
from rollplex.core.errors import BadInput
from rollplex.core.placement import ITEM_BYTES
from rollplex.core.shapes import ModelShapes, ModelTensor, Parameter, model_tensors
from rollplex.core.tensor_maps import Axis, Fused, TensorMap
from rollplex.core.topology import Topology

SPLIT, MEGATRON_FUSED = "split", "megatron-fused"
TRAIN_LAYOUTS = (SPLIT, MEGATRON_FUSED)
"""`split`: every parameter a tensor of its own, as rollplex.model trains. `megatron-fused`: Megatron's linear_qkv, a kv group
after the other, and linear_fc1 = [gate; up]."""


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """One rollout tensor."""

    tensor: ModelTensor
    aliasing: Aliasing

    @property
    def case(self) -> AliasCase:
        return self.aliasing.case

    @property
    def rollout_elements(self) -> int:
        """Of a rollout shard, padding included."""
        return self.aliasing.elements

    @property
    def training_elements(self) -> int:
        """Of a training rank's shards, padding included."""
        return sum(rows * cols for rows, cols in (item.shape for item in self.aliasing.training))


def model_verdicts(shapes: ModelShapes, topology: Topology, train_layout: str = SPLIT) -> Iterator[TensorVerdict]:
    """Every rollout tensor in slab order. Raises BadInput, with the numbers, where heads or sizes do not divide."""
    if train_layout not in TRAIN_LAYOUTS:
        raise BadInput(f"training layout {train_layout!r} is none of {', '.join(TRAIN_LAYOUTS)}", reason="BAD_LAYOUT")
    for engine, tp in (("training", topology.train_tp), ("rollout", topology.rollout_tp)):
        if shapes.head_count % tp:
            raise BadInput(f"{shapes.head_count} attention heads are not divisible by {engine}'s TP {tp}", reason="BAD_LAYOUT")
    vocab = shapes.padded_vocab(topology.train_tp)
    for tensor in model_tensors(shapes):
        parameters = tensor.parameters
        rollout = _map(parameters, topology.rollout_tp, vocab)
        if train_layout == SPLIT or len(parameters) == 1 or tensor.is_vision:
            training = [_map((parameter,), topology.train_tp, vocab) for parameter in parameters]
        else:
            is_attention = parameters[0].heads is not None
            training = [_map(parameters, topology.train_tp, vocab, groups=shapes.kv_head_count if is_attention else None)]
        yield TensorVerdict(tensor, classify(rollout, training, is_vector=len(parameters[0].shape) == 1))


def _map(parameters: tuple[Parameter, ...], tp: int, vocab: int, groups: int | None = None) -> TensorMap:
    first = parameters[0]
    return TensorMap(tuple(Fused(item.name, item.rows, item.heads) for item in parameters), first.cols, tp, first.axis,
                     vocab if first.axis is Axis.VOCAB else None, groups)


@dataclass(frozen=True, slots=True)
class ClassTotal:
    """What one alias class (or the vision tower) adds up to."""

    parameters: int = 0
    tensors: int = 0
    rollout_elements: int = 0
    """On each GPU, in rollout's slab."""
    training_elements: int = 0
    """Of a training rank."""

    def __add__(self, other: ClassTotal) -> ClassTotal:
        return ClassTotal(self.parameters + other.parameters, self.tensors + other.tensors,
                          self.rollout_elements + other.rollout_elements, self.training_elements + other.training_elements)


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """`language` by alias class; the tower, whole on every GPU, apart."""

    topology: Topology
    train_layout: str
    dtype: str
    language: dict[AliasCase, ClassTotal]
    vision: dict[AliasCase, ClassTotal]

    @property
    def language_total(self) -> ClassTotal:
        return sum(self.language.values(), ClassTotal())

    @property
    def vision_total(self) -> ClassTotal:
        return sum(self.vision.values(), ClassTotal())

    def share(self, case: AliasCase) -> float:
        """Of the language model's parameters."""
        return self.language[case].parameters / self.language_total.parameters

    @property
    def rebuilt_bytes(self) -> int:
        """Rollout-layout buffers on each GPU, rebuilt after every update."""
        return (self.language[AliasCase.INCOMPATIBLE] + self.vision[AliasCase.INCOMPATIBLE]).rollout_elements * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@lru_cache(maxsize=64)
def summarise(shapes: ModelShapes, topology: Topology, train_layout: str = SPLIT, dtype: str = "bfloat16") -> LayoutSummary:
    language = {case: ClassTotal() for case in AliasCase}
    vision = dict(language)
    for verdict in model_verdicts(shapes, topology, train_layout):
        totals = vision if verdict.tensor.is_vision else language
        totals[verdict.case] += ClassTotal(verdict.tensor.element_count, 1, verdict.rollout_elements,
                                           verdict.training_elements)
    return LayoutSummary(topology, train_layout, dtype, language, vision)
