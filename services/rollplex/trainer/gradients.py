"""One flat gradient buffer a rank, in the dtype of the optimizer state, accumulated over groups until UPDATE.

Where the model has that dtype, a parameter's `.grad` IS its view of the buffer; otherwise (bfloat16 actor, float32 buffer) a
hook adds every finished gradient to the view, so that sums over groups are never rounded to the actor's dtype.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist

from rollplex.core.errors import DataLoss
from rollplex.model import VisionLanguageModel
from rollplex.trainer.optimizer_state import StateLayout


class GradientBuffer:
    """`attach` and `detach` are the pair; the buffer's bytes belong to a slab."""

    def __init__(self, layout: StateLayout, slab: torch.Tensor, model: VisionLanguageModel) -> None:
        self._layout, self._model = layout, model
        flat = slab[:slab.numel() // 8 * 8].view(getattr(torch, layout.dtype))
        self.flat = flat[:layout.element_count]
        """[trainable elements], chunk after chunk."""
        self.views, start = {}, 0
        for name, count in layout.element_counts:
            self.views[name] = _as_stored(model, name, self.flat[start:start + count])
            start += count
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Trainable parameters take gradients into the buffer; all others take none."""
        for name, parameter in self._model.parameters_by_name().items():
            view = self.views.get(name)
            parameter.grad = None
            parameter.requires_grad_(view is not None)
            if view is None:
                continue
            if view.dtype == parameter.dtype:
                parameter.grad = view
            else:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_add_to, view)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._model.parameters():
            parameter.grad = None

    def zero(self) -> None:
        self.flat.zero_()

    def chunk(self, index: int) -> torch.Tensor:
        """The gradient of a chunk's elements."""
        start = self._layout.chunk_starts[index]
        return self.flat[start:start + self._layout.chunks[index].element_count]

    def sum_replicas(self) -> None:
        """Adds up gradients of kv heads that several ranks hold; once, after the last backward of a mini-batch."""
        for name, view in self.views.items():
            shard = self._model.shards[name]
            if shard.axis is None or not shard.replicated:
                continue
            whole = torch.zeros(shard.full_shape, dtype=view.dtype, device=view.device)
            shard.take(whole, self._model.tp_rank).copy_(view)
            dist.all_reduce(whole, group=self._model.group)
            view.copy_(shard.take(whole, self._model.tp_rank))

    def check_replicas(self) -> None:
        """Raises DataLoss, naming parameters, where ranks have different gradients of what all of them hold whole."""
        names = [name for name in self.views if self._model.shards[name].axis is None]
        words = [self.views[name].contiguous().view(-1).view(torch.int32) for name in names]
        sums = torch.stack([part.sum(dtype=torch.int64) for part in words]) if words else torch.zeros(0, dtype=torch.int64)
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._model.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._model.group)
        if differing := [name for name, same in zip(names, (least == most).tolist()) if not same]:
            raise DataLoss(f"ranks have different gradients of {len(differing)} replicated parameters: "
                           f"{', '.join(differing[:5])}", reason="REPLICAS_DIFFER")

    def norm(self) -> float:
        """L2 norm over all ranks in float64, each element of the whole model counted once; not finite if any is not."""
        total = torch.zeros((), dtype=torch.float64)
        for name, view in self.views.items():
            if self._model.shards[name].first_holder(self._model.tp_rank):
                total += torch.linalg.vector_norm(view, dtype=torch.float64).square().cpu()
        if self._model.tp_size > 1:
            dist.all_reduce(total, group=self._model.group)
        return math.sqrt(value) if math.isfinite(value := float(total)) else value


def _as_stored(model: VisionLanguageModel, name: str, flat: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient over its flat elements, which lie in the order of the parameter's own bytes."""
    shape = model.shards[name].shape
    transposed = model.layout.tensors[model.layout.rollout_name_of[name]].transposed
    return flat.view(shape[::-1]).t() if transposed else flat.view(shape)


def _add_to(view: torch.Tensor, parameter: torch.Tensor) -> None:
    view.add_(parameter.grad)
    parameter.grad = None
