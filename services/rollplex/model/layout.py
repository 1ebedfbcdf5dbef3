"""The actor's bytes on one device: what rollout holds, and the same bytes under training's names.

One slab a device, every tensor at a 256-byte boundary, the same for every rollout shard. Rollout names and fusions are vLLM's;
a fused tensor's segments ([q; k; v], [gate; up]) are row slabs, so training sees each as a tensor of its own without a copy.
q = TP_train / TP_rollout training ranks nest in a rollout shard: each owns a `part` of every segment. What tensor
parallelism cuts along its columns (o_proj, down_proj) is stored transposed when q > 1, so that each part is a run of bytes;
both engines see the logical [O, I] through strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from rollplex.core.errors import BadInput
from rollplex.core.placement import ITEM_BYTES, Placement, align_up
from rollplex.core.topology import Topology
from rollplex.model.config import ModelConfig
from rollplex.model.parameters import rollout_tensors
from rollplex.model.shard import Shard

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a rollout tensor, under their training name: one segment."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class LayoutTensor:
    """One tensor as rollout holds it."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    transposed: bool = False
    """Bytes are those of the contiguous [I, O]; `shape` is the logical [O, I]."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def placement(self, slab: str) -> Placement:
        if not self.transposed:
            return Placement.contiguous(slab, self.offset_bytes, self.shape, self.dtype)
        return Placement(slab, self.offset_bytes, self.shape, (1, self.shape[0]), self.dtype)


@dataclass(frozen=True)
class ActorLayout:
    """Rollout's tensors in slab order, the same for every rank, and the cuts of each training parameter."""

    topology: Topology
    dtype: str
    size_bytes: int
    tensors: dict[str, LayoutTensor]
    shards: dict[str, Shard]
    """Whole parameter -> training rank."""
    rollout_shards: dict[str, Shard]
    """Whole parameter -> its segment in a rollout shard."""

    @classmethod
    def build(cls, config: ModelConfig, rollout_tp: int, dtype: str, train_tp: int | None = None) -> ActorLayout:
        """`train_tp`: that of rollout when absent. Raises BadInput, with the numbers, for what does not divide."""
        if dtype not in ("float32", "float64", "bfloat16"):
            raise BadInput(f"weights of dtype {dtype!r}; supported are float32, float64, bfloat16")
        topology = Topology(rollout_tp if train_tp is None else train_tp, rollout_tp)
        tensors: dict[str, LayoutTensor] = {}
        shards: dict[str, Shard] = {}
        rollout_shards: dict[str, Shard] = {}
        end = 0
        for name, parameters in rollout_tensors(config, topology):
            segments = {parameter.name: parameter.shard(rollout_tp) for parameter in parameters}
            rows = [shard.shape[0] for shard in segments.values()]
            stops = [sum(rows[: index + 1]) for index in range(len(rows))]
            parts = tuple(Part(part, stop - count, stop) for part, stop, count in zip(segments, stops, rows))
            shape = (sum(rows), *next(iter(segments.values())).shape[1:])
            transposed = topology.q > 1 and parameters[0].axis == 1
            tensors[name] = LayoutTensor(align_up(end, ALIGNMENT_BYTES), shape, dtype, parts, transposed)
            end = tensors[name].offset_bytes + tensors[name].size_bytes
            rollout_shards.update(segments)
            shards.update({parameter.name: parameter.shard(topology.train_tp) for parameter in parameters})
        return cls(topology, dtype, align_up(end, ALIGNMENT_BYTES), tensors, shards, rollout_shards)

    @property
    def tp(self) -> int:
        """TP_rollout: of how many shards the slab holds one."""
        return self.topology.rollout_tp

    def shards_at(self, tp: int) -> dict[str, Shard]:
        """The cuts for a model at `tp` ranks: training's, or rollout's own (its prefill)."""
        if tp not in (self.topology.train_tp, self.topology.rollout_tp):
            raise BadInput(f"a model at tensor-parallel size {tp} on a layout of TP_train {self.topology.train_tp} and "
                           f"TP_rollout {self.topology.rollout_tp}", reason="BAD_TOPOLOGY")
        return self.shards if tp == self.topology.train_tp else self.rollout_shards

    def placements(self, slab: str) -> dict[str, Placement]:
        """By rollout name."""
        return {name: tensor.placement(slab) for name, tensor in self.tensors.items()}

    def training_placements(self, slab: str, part: int = 0) -> dict[str, Placement]:
        """What the training rank with this part of the shard owns, by training name."""
        found = {}
        for name, placement in self.placements(slab).items():
            for segment in self.tensors[name].parts:
                rows = placement.narrow(0, segment.start, segment.stop)
                axis, start, stop = self.cut(segment.name, part)
                found[segment.name] = rows.narrow(axis, start, stop)
        return found

    def views(self, slab_bytes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rollout's tensors inside a uint8 tensor over the slab."""
        dtype, found = getattr(torch, self.dtype), {}
        for name, tensor in self.tensors.items():
            flat = slab_bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].view(dtype)
            found[name] = flat.view(tensor.shape[::-1]).t() if tensor.transposed else flat.view(tensor.shape)
        return found

    def segment_views(self, rollout_views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole shard by training name: what a model at TP_rollout binds."""
        return {
            segment.name: rollout_views[name][segment.start : segment.stop]
            for name, tensor in self.tensors.items()
            for segment in tensor.parts
        }

    def training_views(self, rollout_views: Mapping[str, torch.Tensor], part: int = 0) -> dict[str, torch.Tensor]:
        """The part of the shard that its training rank owns, by training name."""
        return {name: self.take_part(name, view, part) for name, view in self.segment_views(rollout_views).items()}

    def take_part(self, name: str, segment: torch.Tensor, part: int) -> torch.Tensor:
        """A training rank's part of a segment."""
        axis, start, stop = self.cut(name, part)
        return segment.narrow(axis, start, stop - start)

    def cut(self, name: str, part: int) -> tuple[int, int, int]:
        """(axis, start, stop) of a part in its segment; several parts may share one cut (kv heads, replicated tensors)."""
        if not 0 <= part < self.topology.q:
            raise BadInput(f"part {part} of a rollout shard with {self.topology.q} training ranks", reason="BAD_TOPOLOGY")
        segment, axis = self.rollout_shards[name].shape, self.shards[name].axis or 0
        extent = segment[axis] // self._pieces(name)
        start = part * self._pieces(name) // self.topology.q * extent
        return axis, start, start + extent

    def destinations(self, name: str, part: int) -> tuple[int, ...]:
        """Parts on whose devices this part's rank writes the parameter, its own among them.

        A piece that several ranks hold is divided among them by device, so that every byte has one writer.
        """
        copies = self.topology.q // self._pieces(name)
        return tuple(range(part % copies, self.topology.q, copies))

    def stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A view in the order in which the parameter's bytes lie; of a part or a segment."""
        return tensor.t() if self.tensors[self.rollout_name_of[name]].transposed else tensor

    @cached_property
    def rollout_name_of(self) -> dict[str, str]:
        return {part.name: name for name, tensor in self.tensors.items() for part in tensor.parts}

    def _pieces(self, name: str) -> int:
        """Into how many pieces training cuts a segment: q, or fewer where ranks share one."""
        return self.shards[name].pieces // self.rollout_shards[name].pieces
