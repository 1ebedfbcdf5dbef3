"""The streamed update: AdamW chunk by chunk, each committed by its flip record, each cast into the slabs that rollout reads.

Protocol: update-protocol.md, "Order inside UPDATE", 4. A chunk goes load -> AdamW -> write-back to a spare slot -> flip ->
cast; on a GPU neighbouring chunks are in different steps at the same time (chunk_pipeline.py), each in this order. `run` may be
interrupted anywhere and called again, by this process or its successor, with the same order: chunks whose flip is on record are
only cast again, the others are computed from their old slot and the gradient buffer, which changes only after the last flip.
The result is bit-identical to an unbroken run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollplex.core.config import OptimizerConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import WrongState
from rollplex.core.work import UpdateOrder, UpdateResult
from rollplex.model import module_of
from rollplex.trainer.chunk_pipeline import ChunkPipeline, pipeline_for
from rollplex.trainer.gradients import GradientBuffer
from rollplex.trainer.optimizer_state import OptimizerState


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring elements of a chunk that are updated alike."""

    start: int
    stop: int
    learning_rate: float
    weight_decay: float


class StreamedUpdate:
    """One update of one rank, computed on `device`: a host, or the GPU that the targets are on."""

    def __init__(self, state: OptimizerState, gradients: GradientBuffer, targets: Mapping[str, Sequence[torch.Tensor]],
                 config: OptimizerConfig, device: torch.device | str = "cpu") -> None:
        """`targets`: by training name, flat, one a slab that the parameter goes to; writable for as long as `run` lasts."""
        self._state, self._gradients, self._config = state, gradients, config
        self._targets = targets
        self._one_dimensional = {name for name, view in gradients.views.items() if view.dim() < 2}
        self._rates = config.module_learning_rates()
        self._device = torch.device(device)
        self._loads_gradients = gradients.apart
        self._unflipped: dict[int, int] = {}
        """Slot by chunk, of write-backs under way."""
        self._dtype = getattr(torch, state.layout.dtype)
        rows = 4 if self._loads_gradients else 3
        self._pipeline: ChunkPipeline = pipeline_for(self._device, rows, state.layout.slot_elements, self._dtype,
                                                     len(state.layout.chunks))

    @property
    def working_bytes(self) -> int:
        """On the device, whatever the model's size."""
        return self._pipeline.peak_bytes(max((chunk.element_count for chunk in self._state.layout.chunks), default=0))

    def run(self, order: UpdateOrder, after_chunk: Callable[[int, int], None] = lambda done, total: None) -> UpdateResult:
        """Brings every chunk to `order.optimizer_step` and the actor with it. `after_chunk(done, total)` may raise.

        Raises WrongState when the state is neither at this step nor at the one before.
        """
        state, chunks = self._state, self._state.layout.chunks
        self._check_step(order.optimizer_step)
        self._pipeline.begin()
        self._unflipped.clear()
        count, lag = len(chunks), self._pipeline.lag
        work: dict[int, torch.Tensor] = {}
        stale = {index for index in range(count) if state.step_of(index) != order.optimizer_step}
        moved = peak = 0
        try:
            for place in range(count + 2 * lag if count else 0):
                if place < count:
                    work[place] = self._load(place)
                    crash_point("trainer.update.chunk_loaded")
                if (index := place - lag) in work and index in stale:
                    self._compute(index, work[index], order)
                    crash_point("trainer.update.chunk_computed")
                    self._unflipped[index] = self._write_back(index, work[index])
                    crash_point("trainer.update.chunk_written")
                if (index := place - 2 * lag) not in work:
                    continue
                if index in stale:
                    self._pipeline.wait_written(index)
                    state.flip(index, self._unflipped.pop(index), order.optimizer_step)
                    crash_point("trainer.update.chunk_flipped")
                    elements = chunks[index].element_count
                    moved += 2 * 3 * elements * self._dtype.itemsize
                    peak = max(peak, self._pipeline.peak_bytes(elements))
                self._cast(index, work.pop(index)[0])
                crash_point("trainer.update.chunk_cast")
                after_chunk(index + 1, count)
        finally:
            # Nothing may still be read or written once slabs are unmapped, or the order is given again.
            self._pipeline.drain()
        crash_point("trainer.update.chunks_done")
        state.finish_step(order.optimizer_step)
        return UpdateResult(count, moved, peak)

    def _check_step(self, wanted: int) -> None:
        finished = self._state.optimizer_step
        if wanted not in (finished, finished + 1):
            raise WrongState(f"optimizer step {wanted} was ordered; the state is at {finished}", reason="STALE_STEP",
                             optimizer_step=finished)

    def _load(self, index: int) -> torch.Tensor:
        """[3, elements] in working memory; with the gradient as a fourth row where that lies elsewhere."""
        rows = list(self._state.current(index))
        if self._loads_gradients:
            rows.append(self._gradients.chunk(index))
        return self._pipeline.load(index, rows)

    def _compute(self, index: int, work: torch.Tensor, order: UpdateOrder) -> None:
        with self._pipeline.computing(index):
            gradient = (work[3] if self._loads_gradients else self._gradients.chunk(index)) * order.clip_coefficient
            for segment in self._segments(index):
                part = slice(segment.start, segment.stop)
                adamw_(work[0, part], work[1, part], work[2, part], gradient[part], self._config,
                       learning_rate=segment.learning_rate * order.learning_rate_factor, weight_decay=segment.weight_decay,
                       step=order.optimizer_step)

    def _write_back(self, index: int, work: torch.Tensor) -> int:
        """Fills a spare slot and returns its number."""
        slot, target = self._state.spare(index, ahead=len(self._unflipped))
        self._pipeline.write_back(index, work[:3], target)
        return slot

    def _cast(self, index: int, master: torch.Tensor) -> None:
        """Master weights, the committed ones still in working memory, into every slab that holds them, in the actor's dtype."""
        offset = 0
        with self._pipeline.computing(index):
            for span in self._state.layout.chunks[index].spans:
                size = span.stop - span.start
                for target in self._targets[span.name]:
                    target[span.start:span.stop].copy_(master[offset:offset + size], non_blocking=True)
                offset += size
        self._pipeline.done(index)

    def _segments(self, index: int) -> list[Segment]:
        """Spans joined where learning rate and weight decay agree; biases and norms (1-D) do not decay."""
        segments: list[Segment] = []
        offset = 0
        for span in self._state.layout.chunks[index].spans:
            stop = offset + span.stop - span.start
            decay = 0.0 if span.name in self._one_dimensional else self._config.weight_decay
            rate = self._rates[module_of(span.name)]
            if segments and (segments[-1].learning_rate, segments[-1].weight_decay) == (rate, decay):
                segments[-1] = Segment(segments[-1].start, stop, rate, decay)
            else:
                segments.append(Segment(offset, stop, rate, decay))
            offset = stop
        return segments


def adamw_(master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
           config: OptimizerConfig, *, learning_rate: float, weight_decay: float, step: int) -> None:
    """AdamW (arXiv 1711.05101, alg. 2) as torch.optim.AdamW computes it, in place on flat tensors of one dtype;
    `gradient` is overwritten.

    One rounding an operation: torch's fused addcmul and addcdiv round differently in vector lanes and in the remainder of a
    loop, and the result would depend on where a chunk begins. So a GPU gives a CPU's bits, too; a division by a number would
    not: CUDA multiplies by its reciprocal, a CPU divides; nor would a CPU's float32 square root, MKL's, which is one bit off
    in one value of five.
    """
    if weight_decay:
        master.mul_(1 - learning_rate * weight_decay)
    first.add_((gradient - first).mul_(1 - config.beta1))
    second.mul_(config.beta2).add_(gradient.square().mul_(1 - config.beta2))
    scale = 1 / math.sqrt(1 - config.beta2**step)
    denominator = _square_root(second, out=gradient).mul_(scale).add_(config.epsilon)
    master.sub_((first / denominator).mul_(learning_rate / (1 - config.beta1**step)))


def _square_root(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Correctly rounded everywhere: a float64 root rounded to float32 is the float32 root."""
    if values.dtype is torch.float32 and not values.is_cuda:
        return out.copy_(values.double().sqrt_())
    return torch.sqrt(values, out=out)
