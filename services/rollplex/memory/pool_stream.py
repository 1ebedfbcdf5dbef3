"""Copies between a GPU and the pinned pool, beside the stream that computes."""

from __future__ import annotations

import torch


class PoolStream:
    """One stream for both directions: copies keep their order, so a place in the pool that is freed may be given out again at
    once, and what is fetched has arrived there before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """Into the pool, after what was ordered on the current stream. The caller may drop the tensor at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def fetch(self, place: torch.Tensor) -> Fetch:
        """Begins to bring a tensor back."""
        # Made in the current stream's memory, whose earlier use must be over.
        tensor = torch.empty(place.shape, dtype=place.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(place, non_blocking=True)
        tensor.record_stream(self._stream)
        return Fetch(tensor, self._stream.record_event())

    def close(self) -> None:
        """Everything has arrived."""
        self._stream.synchronize()


class Fetch:
    """A tensor on its way to the GPU."""

    def __init__(self, tensor: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._tensor, self._arrived = tensor, arrived

    def result(self) -> torch.Tensor:
        """The tensor, which the current stream uses only after it has arrived."""
        torch.cuda.current_stream(self._tensor.device).wait_event(self._arrived)
        return self._tensor
