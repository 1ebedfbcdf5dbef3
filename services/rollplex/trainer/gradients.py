"""One flat gradient buffer a rank, in the dtype of the optimizer state, accumulated over groups until UPDATE.

Where the model has that dtype and lies in the same memory, a parameter's `.grad` IS its view of the buffer; otherwise (bfloat16
actor, float32 buffer; or a GPU's gradients in host memory) a hook adds every finished gradient to the view, so that sums over
groups are never rounded to the actor's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollplex.core.errors import DataLoss
from rollplex.model import VisionLanguageModel, summed_over_ranks
from rollplex.trainer.host_sums import PIECE_ELEMENTS, HostSums
from rollplex.trainer.optimizer_state import StateLayout


class GradientBuffer:
    """`attach` and `detach` are the pair; the buffer's bytes belong to a slab, which need not be there between mini-batches."""

    def __init__(self, layout: StateLayout, slab: torch.Tensor, model: VisionLanguageModel) -> None:
        self._layout, self._model = layout, model
        self._device = model.head_weight.device
        flat = slab[:slab.numel() // 8 * 8].view(getattr(torch, layout.dtype))
        self.flat = flat[:layout.element_count]
        """[trainable elements], chunk after chunk."""
        self._flat_of: dict[str, torch.Tensor] = {}
        self.views, start = {}, 0
        for name, count in layout.element_counts:
            self._flat_of[name] = self.flat[start:start + count]
            self.views[name] = _as_stored(model, name, self._flat_of[name])
            start += count
        self.apart = lies_apart(self.flat, self._device)
        """The buffer is in host memory, the model on a GPU."""
        self._sums = HostSums(self._device) if self.apart else None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Trainable parameters take gradients into the buffer; all others take none."""
        for name, parameter in self._model.parameters_by_name().items():
            view = self.views.get(name)
            parameter.grad = None
            parameter.requires_grad_(view is not None)
            if view is None:
                continue
            if self._sums is not None:
                transposed = view.dim() == 2 and not view.is_contiguous()
                hook = partial(_add_on_host, self._sums, self._flat_of[name], transposed)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            elif view.dtype == parameter.dtype:
                parameter.grad = view
            else:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_add_to, view)))

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
            self.flat.zero_()
        else:
            self._sums.zero(self.flat)
            self._sums.settle()

    def chunk(self, index: int) -> torch.Tensor:
        """The gradient of a chunk's elements."""
        start = self._layout.chunk_starts[index]
        return self.flat[start:start + self._layout.chunks[index].element_count]

    def sum_replicas(self) -> None:
        """Adds up gradients of kv heads that several ranks hold, and of the tower, of which each rank has a part; once, after the
        last backward of a mini-batch.

        Of what else every rank holds whole each has the whole gradient. On GPUs, where a kernel may sum in any order, rank 0's is
        then everybody's: ranks whose replicas drift apart no longer train one model.
        """
        for name, view in self.views.items():
            shard = self._model.shards[name]
            if self._model.tp_size > 1 and shard.axis is None:
                if summed_over_ranks(name):
                    self._through_device(self._flat_of[name], dist.all_reduce)
                elif self._device.type == "cuda":
                    self._through_device(self._flat_of[name], partial(dist.broadcast, group_src=0))
            if shard.axis is None or not shard.replicated:
                continue
            whole = torch.zeros(shard.full_shape, dtype=view.dtype, device=self._device)
            shard.take(whole, self._model.tp_rank).copy_(view)
            dist.all_reduce(whole, group=self._model.group)
            view.copy_(shard.take(whole, self._model.tp_rank))

    def _through_device(self, flat: torch.Tensor, collective: Callable[..., Any]) -> None:
        """A collective in place, through memory of the allocator's own: NCCL gets no mapped slab."""
        for piece in flat.split(PIECE_ELEMENTS):
            whole = torch.empty_like(piece, device=self._device).copy_(piece)
            collective(whole, group=self._model.group)
            piece.copy_(whole)

    def check_replicas(self) -> None:
        """Raises DataLoss, naming parameters, where ranks have different gradients of what all of them hold whole."""
        names = [name for name in self.views if self._model.shards[name].axis is None]
        words = [self.views[name].contiguous().view(-1).view(torch.int32) for name in names]
        sums = torch.stack([part.sum(dtype=torch.int64) for part in words]) if words else torch.zeros(0, dtype=torch.int64)
        sums = sums.to(self._device)
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._model.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._model.group)
        if differing := [name for name, same in zip(names, (least == most).tolist()) if not same]:
            raise DataLoss(f"ranks have different gradients of {len(differing)} replicated parameters: "
                           f"{', '.join(differing[:5])}", reason="REPLICAS_DIFFER")

    def norm(self) -> float:
        """L2 norm over all ranks in float64, each element of the whole model counted once; not finite if any is not.

        The host waits once, for the result.
        """
        pieces = [piece for name, flat in self._flat_of.items() if self._model.shards[name].first_holder(self._model.tp_rank)
                  for piece in flat.split(PIECE_ELEMENTS)]
        # Piece by piece: the float64 that torch makes of its argument would be twice the buffer.
        squares = [torch.linalg.vector_norm(piece.to(self._device, non_blocking=True), dtype=torch.float64).square()
                   for piece in pieces]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
        if self._model.tp_size > 1:
            dist.all_reduce(total, group=self._model.group)
        return math.sqrt(value) if math.isfinite(value := float(total)) else value


def lies_apart(flat: torch.Tensor, device: torch.device) -> bool:
    return flat.device.type != device.type


def _as_stored(model: VisionLanguageModel, name: str, flat: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient over its flat elements, which lie in the order of the parameter's own bytes."""
    shape = model.shards[name].shape
    transposed = model.layout.tensors[model.layout.rollout_name_of[name]].transposed
    return flat.view(shape[::-1]).t() if transposed else flat.view(shape)


def _add_to(view: torch.Tensor, parameter: torch.Tensor) -> None:
    view.add_(parameter.grad)
    parameter.grad = None


def _add_on_host(sums: HostSums, flat: torch.Tensor, transposed: bool, parameter: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    sums.add(flat, (gradient.t() if transposed else gradient).reshape(-1))
