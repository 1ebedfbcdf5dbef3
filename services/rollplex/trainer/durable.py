"""A rank's part of a durable checkpoint: written from its slabs on a thread of its own, read back into them.

What is read when (docs/adr/0012): `begin` is a command between UPDATE and the next iteration; from then until the thread has
ended, the snapshot's mapping and the slots in force are the checkpoint's. Nothing changes them before the next UPDATE, and before
that one `wait` is called: the checkpoint is one more reader that must have left.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import safe_open

from rollplex.core import checkpoints, work
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import Aborted, DeadlineExceeded, NotFound, RollplexError, WrongState, as_domain_error
from rollplex.core.placement import ITEM_BYTES
from rollplex.model import ActorLayout, ModelConfig
from rollplex.model.checkpoint import copy_companions, disk_name, load_part, unpadded
from rollplex.trainer.actor_slabs import ActorSlabs
from rollplex.trainer.optimizer_state import OptimizerState
from rollplex.trainer.whole_file import PIECE_BYTES, WholeFile

WAIT_STEP_S = 0.2
"""Between two looks at whether a waiting command was aborted."""
STOP_S = 60.0
"""How long one piece of a checkpoint may take to be written when the writer is to end."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DurableCheckpoints:
    """One writer at a time. `begin`, `wait`, `restore` and `stop` on the owner thread, `outcome` on any."""

    def __init__(self, config: ModelConfig, layout: ActorLayout, rank: int, source: Path, device: torch.device) -> None:
        """`rank`: whose part it is. `source`: the model's checkpoint, for configuration, tokenizer and processor files."""
        self._config, self._layout, self._rank, self._source, self._device = config, layout, rank, source, device
        self._under_way: tuple[str, Future[work.WrittenPart], threading.Event] | None = None

    def digest(self, state: OptimizerState) -> str:
        trained = [name for name, _ in state.layout.element_counts]
        return checkpoints.layout_digest(self._shapes(self._layout.shards), trained, self._layout.dtype)

    def begin(self, path: Path, views: Mapping[str, torch.Tensor], state: OptimizerState) -> int:
        """Starts to write into `path`; the bytes that this rank will write. An earlier writer is stopped first.

        `views`: this rank's parameters in the bound snapshot.
        """
        self.stop()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        future: Future[work.WrittenPart] = Future()
        future.set_running_or_notify_cancel()
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(future, stopping, path, views, state), name="checkpoint", daemon=True)
        self._under_way = str(path), future, stopping
        thread.start()
        elements = sum(math.prod(shard.shape) for shard in self._mine(self._layout.shards).values())
        stated = sum(count for name, count in state.layout.element_counts if name in self._mine(self._layout.shards))
        return elements * ITEM_BYTES[self._layout.dtype] + 3 * stated * ITEM_BYTES[state.layout.dtype]

    def outcome(self, path: str) -> Future[work.WrittenPart]:
        """Raises NotFound when another process, or nobody, writes there."""
        under_way = self._under_way
        if under_way is None or under_way[0] != path:
            raise NotFound(f"no checkpoint is written to {path} here; the process may have been restarted",
                           reason="CHECKPOINT_NOT_FOUND")
        return under_way[1]

    def wait(self, context: work.WorkContext) -> None:
        """Until nothing is read any more, well or not. Raises Aborted, DeadlineExceeded when the command is to end first."""
        if self._under_way is None:
            return
        future = self._under_way[1]
        while not future.done():
            with contextlib.suppress(TimeoutError):
                future.exception(WAIT_STEP_S)
            context.check()

    def stop(self) -> None:
        """Ends a writer; it looks between pieces, so that this waits for one piece.

        Raises DeadlineExceeded when a disk does not even take that: what the writer reads must stay mapped.
        """
        if self._under_way is not None:
            path, future, stopping = self._under_way
            stopping.set()
            try:
                future.exception(STOP_S)
            except TimeoutError:
                raise DeadlineExceeded(f"a write to {path} has not come back for {STOP_S:g} s; look at the disk there",
                                       reason="CHECKPOINT_STUCK", path=path) from None
            self._under_way = None

    def restore(self, path: Path, actor: ActorSlabs, state: OptimizerState, optimizer_step: int, digest: str) -> int:
        """Weights and state of new slabs; the bytes read. Raises WrongState for a checkpoint of another model, dtype or choice
        of trained modules."""
        if digest != self.digest(state):
            raise WrongState(f"{path} is of another model or dtype, or trains other modules than this run",
                             reason="CHECKPOINT_MISMATCH", path=path)
        layout = self._layout
        actor.load(path / checkpoints.WEIGHTS, self._config, state)
        names = [name for name, _ in state.layout.element_counts]
        for row, file in enumerate(checkpoints.STATE_FILES):
            with safe_open(str(path / file), framework="pt", device="cpu") as opened:
                for name in names:
                    shard = layout.shards[name]
                    part = torch.empty(shard.shape, dtype=getattr(torch, state.layout.dtype))
                    load_part(name, opened.get_slice(name), part, shard, self._rank, self._config)
                    state.set_row(row, name, layout.stored(name, part))
        state.restore_step(optimizer_step)
        return 3 * state.layout.element_count * ITEM_BYTES[state.layout.dtype] + layout.size_bytes

    def _run(self, future: Future[work.WrittenPart], stopping: threading.Event, path: Path,
             views: Mapping[str, torch.Tensor], state: OptimizerState) -> None:
        def check() -> None:
            if stopping.is_set():
                raise Aborted("the checkpoint was given up", reason="CHECKPOINT_STOPPED")

        try:
            with torch.no_grad(), self._own_stream():
                size_bytes = self._write_weights(path / checkpoints.WEIGHTS, views, check)
                crash_point("trainer.checkpoint.weights_written")
                size_bytes += self._write_state(path, state, check)
                crash_point("trainer.checkpoint.state_written")
            part = work.WrittenPart(size_bytes, self.digest(state), self._layout.dtype, state.layout.dtype)
        except BaseException as error:  # noqa: BLE001 - goes to whoever asks for the outcome
            future.set_exception(_as_ours(error, path))
        else:
            future.set_result(part)

    def _write_weights(self, folder: Path, views: Mapping[str, torch.Tensor], check) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        layout, rank = self._layout, self._rank
        if rank == 0:
            copy_companions(self._source, folder, layout.dtype)
        shapes = {disk_name(name): shape for name, shape in self._shapes(self._layout.shards).items()}
        with _written(WholeFile(folder / "model.safetensors", shapes, layout.dtype, first=rank == 0, check=check)) as file:
            for name, shard in self._mine(self._layout.shards).items():
                for start, block in _blocks(views[name]):
                    file.write(disk_name(name), shard, rank, start, block)
        return file.written_bytes

    def _write_state(self, path: Path, state: OptimizerState, check) -> int:
        layout, rank = self._layout, self._rank
        shards = {name: self._layout.shards[name] for name, _ in state.layout.element_counts}
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(_written(WholeFile(path / name, self._shapes(shards), state.layout.dtype,
                                                            first=rank == 0, check=check)))
                     for name in checkpoints.STATE_FILES]
            for name, shard in self._mine(shards).items():
                for row, file in enumerate(files):
                    if layout.tensors[layout.rollout_name_of[name]].transposed:
                        flat = torch.cat([rows[row].cpu() for _, rows in state.parts(name)])
                        part = flat.view(shard.shape[::-1]).t().contiguous().view(-1)
                        file.write(name, shard, rank, 0, part)
                        continue
                    for start, rows in state.parts(name):
                        file.write(name, shard, rank, start, rows[row].cpu())
        return sum(file.written_bytes for file in files)

    def _mine(self, shards: Mapping) -> dict:
        """What this rank writes: of pieces that several hold, the first holder's."""
        rank = self._rank
        return {name: shard for name, shard in shards.items() if (shard.first_holder(rank) if shard.axis is not None
                                                                  else rank == 0)}

    def _shapes(self, shards: Mapping) -> dict[str, tuple[int, ...]]:
        return {name: unpadded(name, shard, self._config) for name, shard in shards.items()}

    def _own_stream(self) -> contextlib.AbstractContextManager:
        """On a GPU, copies to the host wait for nothing that computes, and nothing waits for them."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))


@contextlib.contextmanager
def _written(file: WholeFile) -> Iterator[WholeFile]:
    """On disk at the end."""
    try:
        yield file
        file.sync()
    finally:
        file.close()


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, flat host copy) of a few rows at a time."""
    width = math.prod(tensor.shape[1:])
    rows = max(1, PIECE_BYTES // (width * tensor.element_size()))
    for row in range(0, tensor.shape[0], rows):
        yield row * width, tensor[row:row + rows].detach().cpu().contiguous().view(-1)


def _as_ours(error: BaseException, path: Path) -> RollplexError:
    if isinstance(error, OSError):
        full = error.errno in FULL
        return WrongState(f"{path}: {error.strerror or error}", reason="CHECKPOINT_DISK_FULL" if full else "CHECKPOINT_IO",
                          path=path)
    return as_domain_error(error)
