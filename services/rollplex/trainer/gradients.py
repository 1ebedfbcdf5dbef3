"""One flat gradient buffer a rank, in the dtype of the optimizer state, accumulated over groups until UPDATE.

Where the model has that dtype and lies in the same memory, a parameter's `.grad` IS its view of the buffer; otherwise (bfloat16
actor, float32 buffer; or a GPU's gradients in host memory) a hook adds every finished gradient to the view, so that sums over
groups are never rounded to the actor's dtype.

Where replicas share an iteration's groups out, a rank's groups also give gradients of parameters whose state its peers have:
these lie behind its own until `sum_over_ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollplex.core.errors import DataLoss
from rollplex.model import Ranks, Shard, VisionLanguageModel, summed_over_ranks
from rollplex.trainer.host_sums import PIECE_ELEMENTS, HostSums
from rollplex.trainer.optimizer_state import StateLayout


class GradientBuffer:
    """`attach` and `detach` are the pair; the buffer's bytes belong to a slab, which need not be there between mini-batches."""

    def __init__(self, layout: StateLayout, slab: torch.Tensor, model: VisionLanguageModel, ranks: Ranks) -> None:
        self._layout, self._model, self._ranks = layout, model, ranks
        self._shards = model.layout.shards
        """Of the state: a rank's, whatever the model is cut into."""
        self._device = model.head_weight.device
        whole = slab[:slab.numel() // 8 * 8].view(getattr(torch, layout.dtype))
        self._all = whole[:layout.element_count + layout.other_elements]
        self.flat = self._all[:layout.element_count]
        """[trainable elements], chunk after chunk."""
        self._flat_of: dict[str, torch.Tensor] = {}
        self.views, start = {}, 0
        for name, count in layout.element_counts:
            self._flat_of[name] = self.flat[start:start + count]
            self.views[name] = self._as_stored(name, self._flat_of[name])
            start += count
        self._parts_of = {name: [flat] for name, flat in self._flat_of.items()}
        """By replica, what its rank has the state of; of what all ranks hold whole the own alone."""
        if ranks.replicas > 1:
            for name, count in layout.element_counts:
                if self._shards[name].axis is not None:
                    self._parts_of[name] = parts = []
                    for replica in range(ranks.replicas):
                        mine = replica == ranks.replica
                        parts.append(self._flat_of[name] if mine else self._all[start:start + count])
                        start += 0 if mine else count
        self.apart = lies_apart(self.flat, self._device)
        """The buffer is in host memory, the model on a GPU."""
        self._sums = HostSums(self._device) if self.apart else None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Trainable parameters take gradients into the buffer; all others take none."""
        for name, parameter in self._model.parameters_by_name().items():
            view, parts = self.views.get(name), self._parts_of.get(name, [])
            parameter.grad = None
            parameter.requires_grad_(view is not None)
            if view is None:
                continue
            if self._sums is None and len(parts) == 1 and view.dtype == parameter.dtype:
                parameter.grad = view
                continue
            add = partial(self._add, name, [(flat, self._as_stored(name, flat)) for flat in parts])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(add))

    def _add(self, name: str, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], parameter: torch.Tensor) -> None:
        """A hook: a finished gradient goes to the parts (flat, as stored) that it is made of."""
        gradient, parameter.grad = parameter.grad, None
        layout = self._model.layout
        for part, (flat, view) in enumerate(parts):
            piece = layout.take_part(name, gradient, part) if len(parts) > 1 else gradient
            if self._sums is not None:
                self._sums.add(flat, layout.stored(name, piece).reshape(-1))
            else:
                view.add_(piece)

    def detach(self) -> None:
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._model.parameters():
            parameter.grad = None

    def settle(self) -> None:
        """Every gradient is in the buffer."""
        if self._sums is not None:
            self._sums.settle()

    def zero(self) -> None:
        if self._sums is None:
            self._all.zero_()
        else:
            self._sums.zero(self._all)
            self._sums.settle()

    def chunk(self, index: int) -> torch.Tensor:
        """The gradient of a chunk's elements."""
        start = self._layout.chunk_starts[index]
        return self.flat[start:start + self._layout.chunks[index].element_count]

    def sum_over_ranks(self) -> None:
        """Adds up what ranks have of one gradient; once, after the last backward of a mini-batch: what the groups of each replica
        gave, of which a rank gets the sum for its own state; and of the tower, and of kv heads that several ranks hold, what each
        rank computed."""
        for name, flat in self._flat_of.items():
            shard = self._shards[name]
            if shard.axis is None:
                self._sum_whole(name, flat)
            elif shard.replicated:
                self._sum_heads(name, shard)
            else:
                self._sum_parts(name)

    def _sum_whole(self, name: str, flat: torch.Tensor) -> None:
        """What every rank holds whole. A replica's ranks have the same gradient of all but the tower. On GPUs, where a kernel may
        sum in any order, rank 0's is then everybody's: ranks that drift apart no longer train one model."""
        ranks = self._ranks
        if ranks.size == 1:
            return
        if summed_over_ranks(name):
            self._through_device(flat, partial(dist.all_reduce, group=ranks.world))
            return
        if ranks.replicas > 1:
            self._through_device(flat, partial(dist.all_reduce, group=ranks.data))
        if self._device.type == "cuda":
            self._through_device(flat, partial(dist.broadcast, group=ranks.world, group_src=0))

    def _sum_parts(self, name: str) -> None:
        """What one rank has the state of: to it."""
        parts = self._parts_of[name]
        if len(parts) > 1:
            for replica, flat in enumerate(parts):
                self._through_device(flat, partial(dist.reduce, group=self._ranks.data, group_dst=replica))

    def _sum_heads(self, name: str, shard: Shard) -> None:
        """What several ranks have the state of: in one sum for all, since another order for each would let them drift apart."""
        ranks, layout, view = self._ranks, self._model.layout, self.views[name]
        whole = torch.zeros(shard.full_shape, dtype=view.dtype, device=self._device)
        if ranks.replicas == 1:
            shard.take(whole, ranks.rank).copy_(view)
        else:
            mine = self._model.shards[name].take(whole, ranks.tensor_rank)
            for replica, flat in enumerate(self._parts_of[name]):
                layout.take_part(name, mine, replica).copy_(self._as_stored(name, flat))
        dist.all_reduce(whole, group=ranks.world)
        view.copy_(shard.take(whole, ranks.rank))

    def _through_device(self, flat: torch.Tensor, collective: Callable[..., Any]) -> None:
        """A collective in place, through memory of the allocator's own: NCCL gets no mapped slab."""
        for piece in flat.split(PIECE_ELEMENTS):
            whole = torch.empty_like(piece, device=self._device).copy_(piece)
            collective(whole)
            piece.copy_(whole)

    def check_replicas(self) -> None:
        """Raises DataLoss, naming parameters, where ranks have different gradients of what all of them hold whole."""
        names = [name for name in self.views if self._shards[name].axis is None]
        words = [self.views[name].contiguous().view(-1).view(torch.int32) for name in names]
        sums = torch.stack([part.sum(dtype=torch.int64) for part in words]) if words else torch.zeros(0, dtype=torch.int64)
        sums = sums.to(self._device)
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._ranks.world)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._ranks.world)
        if differing := [name for name, same in zip(names, (least == most).tolist()) if not same]:
            raise DataLoss(f"ranks have different gradients of {len(differing)} replicated parameters: "
                           f"{', '.join(differing[:5])}", reason="REPLICAS_DIFFER")

    def norm(self) -> float:
        """L2 norm over all ranks in float64, each element of the whole model counted once; not finite if any is not.

        The host waits once, for the result.
        """
        pieces = [piece for name, flat in self._flat_of.items() if self._shards[name].first_holder(self._ranks.rank)
                  for piece in flat.split(PIECE_ELEMENTS)]
        # Piece by piece: the float64 that torch makes of its argument would be twice the buffer.
        squares = [torch.linalg.vector_norm(piece.to(self._device, non_blocking=True), dtype=torch.float64).square()
                   for piece in pieces]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
        if self._ranks.size > 1:
            dist.all_reduce(total, group=self._ranks.world)
        return math.sqrt(value) if math.isfinite(value := float(total)) else value

    def _as_stored(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """A gradient over its flat elements, which lie in the order of the parameter's own bytes."""
        shape = self._shards[name].shape
        transposed = self._model.layout.tensors[self._model.layout.rollout_name_of[name]].transposed
        return flat.view(shape[::-1]).t() if transposed else flat.view(shape)


def lies_apart(flat: torch.Tensor, device: torch.device) -> bool:
    return flat.device.type != device.type
