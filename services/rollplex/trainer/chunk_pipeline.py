"""Where the streamed update works on a chunk: three steps, in turn on a host, on three streams of a GPU.

`load` -> `computing` (AdamW) -> `write_back` -> `wait_written` -> `computing` (cast) -> `done`, by the chunk's index. On a GPU
chunk i+1 is on its way in, i in AdamW and i-1 on its way out at the same time, so `lag` chunks lie between these steps, and
three staging buffers take turns. A host is the case of lag 0 and one buffer.

Legend: R rows (master, two moments and, where gradients lie elsewhere, the gradient), E elements of the largest chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

WORKSPACE_ROWS = 3
"""Temporaries of AdamW at once, each [E] at most: scaled gradient, denominator, quotient."""


class ChunkPipeline:
    """On a host. Chunks go through in the order of their indices."""

    def __init__(self, rows: int, elements: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, lag: int = 0,
                 chunks: int | None = None) -> None:
        """`elements`: E. `rows`: R. `chunks`: of an update; fewer than the buffers need no more buffers than that."""
        self.lag = lag
        """The loop computes chunk i - lag after it has loaded i, and ends i - 2 * lag."""
        count = 2 * lag + 1 if chunks is None else min(2 * lag + 1, max(1, chunks))
        self._buffers = torch.empty(count, rows, elements, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._buffers.device

    def peak_bytes(self, elements: int) -> int:
        """Working memory that an update with chunks of up to so many elements takes."""
        return len(self._buffers) * self._buffers.shape[1] * elements * self._buffers.element_size()

    def begin(self) -> None:
        """Before the first load."""

    def load(self, index: int, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Chunk's rows [n], in host memory -> [R, n] in working memory, which `computing` may touch until `done`."""
        work = self._buffers[index % len(self._buffers), :len(rows), :rows[0].numel()]
        _copy_rows(work, rows)
        return work

    @contextmanager
    def computing(self, index: int) -> Iterator[None]:
        """What is done inside with the chunk comes after its load."""
        yield

    def write_back(self, index: int, work: torch.Tensor, target: torch.Tensor) -> None:
        """[3, n] to host memory, after what was computed."""
        _copy_rows(target, work)

    def wait_written(self, index: int) -> None:
        """Until the write-back is in host memory."""

    def done(self, index: int) -> None:
        """The chunk's buffer may be loaded again once what was ordered with it is over."""

    def drain(self) -> None:
        """Until everything ordered is over. Idempotent."""


class CudaPipeline(ChunkPipeline):
    """On a GPU. Host memory must be registered (HostRegistration), or nothing overlaps."""

    def __init__(self, rows: int, elements: int, dtype: torch.dtype, device: torch.device | str, *,
                 chunks: int | None = None) -> None:
        super().__init__(rows, elements, dtype, device, lag=1, chunks=chunks)
        self._loading, self._computing, self._writing = (torch.cuda.Stream(self.device) for _ in range(3))
        count = len(self._buffers)
        self._loaded, self._computed, self._written, self._free = (
            [torch.cuda.Event() for _ in range(count)] for _ in range(4))

    def begin(self) -> None:
        # Gradients, and whatever used the buffers' memory before, come first.
        for stream in (self._loading, self._computing):
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def peak_bytes(self, elements: int) -> int:
        return super().peak_bytes(self._buffers.shape[2]) + WORKSPACE_ROWS * elements * self._buffers.element_size()

    def load(self, index: int, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        place = index % len(self._buffers)
        # An event that was never recorded is over.
        self._loading.wait_event(self._free[place])
        with torch.cuda.stream(self._loading):
            work = super().load(index, rows)
        self._loaded[place].record(self._loading)
        return work

    @contextmanager
    def computing(self, index: int) -> Iterator[None]:
        self._computing.wait_event(self._loaded[index % len(self._buffers)])
        with torch.cuda.stream(self._computing):
            yield

    def write_back(self, index: int, work: torch.Tensor, target: torch.Tensor) -> None:
        place = index % len(self._buffers)
        self._computed[place].record(self._computing)
        self._writing.wait_event(self._computed[place])
        with torch.cuda.stream(self._writing):
            super().write_back(index, work, target)
        self._written[place].record(self._writing)

    def wait_written(self, index: int) -> None:
        self._written[index % len(self._buffers)].synchronize()

    def done(self, index: int) -> None:
        self._free[index % len(self._buffers)].record(self._computing)

    def drain(self) -> None:
        for stream in (self._loading, self._computing, self._writing):
            stream.synchronize()


def pipeline_for(device: torch.device, rows: int, elements: int, dtype: torch.dtype, chunks: int) -> ChunkPipeline:
    kind = CudaPipeline if device.type == "cuda" else ChunkPipeline
    return kind(rows, elements, dtype, device, chunks=chunks)


def _copy_rows(target: torch.Tensor, source: Sequence[torch.Tensor] | torch.Tensor) -> None:
    # Row by row: of a strided block torch would first make a contiguous copy, in host memory that is not registered.
    for row, values in zip(target, source):
        row.copy_(values, non_blocking=True)
