"""Gradient sums in host memory while the model is on a GPU: read, added to and written back piece by piece.

The price of keeping them out of HBM is 8 bytes a parameter over the bus for every backward pass, on a stream beside it.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

PIECE_ELEMENTS = 16 << 20
_BACKLOG_BYTES = 1 << 30
"""Gradients that may wait for the bus; a backward pass that is further ahead waits for them."""


class HostSums:
    """`add` and `zero` return at once; `settle` before anybody else touches the sums. On a CPU nothing is ever under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: deque[tuple[torch.cuda.Event, int]] = deque()
        self._waiting_bytes = 0

    def add(self, sums: torch.Tensor, gradient: torch.Tensor) -> None:
        """sums[n] in host memory += gradient[n] on the device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            gradient.record_stream(self._stream)
        with self._on_stream():
            for part, values in zip(sums.split(PIECE_ELEMENTS), gradient.split(PIECE_ELEMENTS), strict=True):
                total = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                total.copy_(part, non_blocking=True)
                total.add_(values)
                part.copy_(total, non_blocking=True)
        self._bound_backlog(gradient.nbytes)

    def zero(self, sums: torch.Tensor) -> None:
        # Written by the GPU: it fills host memory ten times faster than one thread of a CPU.
        with self._on_stream():
            zeros = torch.zeros(min(PIECE_ELEMENTS, sums.numel()), dtype=sums.dtype, device=self._device)
            for part in sums.split(PIECE_ELEMENTS):
                part.copy_(zeros[:part.numel()], non_blocking=True)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._waiting.clear()
        self._waiting_bytes = 0

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bound_backlog(self, size_bytes: int) -> None:
        if self._stream is None:
            return
        self._waiting.append((self._stream.record_event(), size_bytes))
        self._waiting_bytes += size_bytes
        while self._waiting_bytes > _BACKLOG_BYTES:
            event, done_bytes = self._waiting.popleft()
            event.synchronize()
            self._waiting_bytes -= done_bytes
