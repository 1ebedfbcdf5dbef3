"""The stream of fewer SMs on which blocks of a prefix run under `mesh.sharing = "green-context"`.

C is the stream that is current outside, where all else of the process runs; S is the capped one. Why this is right:

- Order. S waits for C on entry, C for S on exit, by events: a block sees all that came before it, and all that comes after sees
  the block. The two never run at the same time, and the host waits for neither.
- Memory. torch's allocator hands a freed block to the next request *of the stream that it was first made for*, at once, since a
  stream runs in order. Made on S and read on C (keys, values, saved inputs): its bytes can only be handed out again inside the
  context, where S has waited for all that C had read by then. Made on C and read on S: handed out again only outside, where C
  has waited for S. So no record_stream and nothing kept alive, as long as every other stream (copies, NCCL) is joined to C
  before what it reads is freed, which C's own memory asks for too. What is freed after S has gone serves nobody until the caches
  are flushed, at the next barrier.
- Backward. Autograd runs an operation's backward on the stream of its forward. rollplex.model.activations therefore runs a
  block's forward without a graph here, and again, with one, on C in the backward pass. What does have a graph on S
  (saved_activations = "keep") has its backward there, capped; autograd itself then joins S to C.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rollplex.core.config import MeshSection

if TYPE_CHECKING:
    from rollplex.memory.green_context import GreenStream

log = logging.getLogger(__name__)


class PrefixStream:
    """rollplex.model.Limit. Owner thread only.

    Its green context is there from the first block of a phase until `rest`: making one takes 2 ms, and while one was there, idle,
    all else of an iteration took twice as long (docs/adr/0009-sharing-policies.md).
    """

    def __init__(self, ordinal: int, percent: int) -> None:
        """Raises InternalError when CUDA gives no green context."""
        self._ordinal, self._percent = ordinal, percent
        self._device = torch.device("cuda", ordinal)
        self._green: GreenStream | None = None
        # A green context is made within the primary one, which torch makes and keeps current on this thread.
        torch.cuda.init()
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)
        self._open()
        self.sm_count = self._green.sm_count
        log.info("prefix blocks run on %d of %d SMs", self.sm_count, self._green.device_sm_count)
        self.rest()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is launched inside runs on the capped stream, in order with what is outside."""
        if self._green is None:
            self._open()
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._green.join(outside.cuda_stream)

    def rest(self) -> None:
        """Gives the SMs back until the next block. Waits for what was launched; no graph may be left that was recorded here.
        Idempotent."""
        green, self._green = self._green, None
        if green is not None:
            self._stream.synchronize()
            # torch keeps a workspace of cuBLAS (32 MiB on Hopper) a stream for ever, by its handle, and the next stream's may be
            # another. It has no public call for that; other streams' workspaces are made again when they are needed.
            torch._C._cuda_clearCublasWorkspaces()
            green.close()

    def _open(self) -> None:
        # Here, so that a process without a GPU never needs cuda-bindings.
        from rollplex.memory.green_context import GreenStream

        self._green = GreenStream(self._ordinal, self._percent)
        self._stream = torch.cuda.ExternalStream(self._green.handle, device=self._device)


def open_prefix_stream(mesh: MeshSection, ordinal: int) -> PrefixStream | None:
    """For the rank on GPU `ordinal`; None where the policy has no such stream, or the mesh no GPU."""
    percent = mesh.prefix_stream_percent
    return None if percent is None else PrefixStream(ordinal, percent)
