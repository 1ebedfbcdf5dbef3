"""Durable checkpoints of the open run: begun after an update, finished beside the next iteration, found again.

The trainer's ranks write what they hold; here the files are hashed, the manifest is written and the folder appears
(core/checkpoints.py). At most one is under way. What goes wrong is a warning in the run's events: the run itself goes on.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rollplex.coordinator import orders
from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import Place
from rollplex.coordinator.records import IterationKey, Note, Run
from rollplex.core import checkpoints
from rollplex.core.checkpoints import Checkpoint, Manifest
from rollplex.core.config import RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, DataLoss, DeadlineExceeded, NotFound, RollplexError, WrongState
from rollplex.core.learning_rate import learning_rate_factor
from rollplex.core.strict import to_plain

FRESH = ("", "never")
"""Values of `resume` under which a run starts from the model's checkpoint."""
AUTO = "auto"
FAILURES = (RollplexError, OSError, TimeoutError)


class RunCheckpoints:
    """`begin` and `settled` are the pair. Event loop only; files are touched on threads."""

    def __init__(self, mesh: Mesh, root: Path) -> None:
        self._mesh, self._root = mesh, root
        self._under_way: asyncio.Task[None] | None = None
        self._closed = False

    @staticmethod
    def due(key: IterationKey, config: RunConfig) -> bool:
        return bool(config.checkpoint_every) and not key.validation and (key.iteration + 1) % config.checkpoint_every == 0

    async def begin(self, run: Run, config: RunConfig, key: IterationKey, next_ordinal: int,
                    emit: Callable[[Note], None]) -> None:
        """After iteration `key`, before any other: the trainer begins to write. Waits for an earlier one's end.

        `next_ordinal`: of the prompt after the iteration's last.
        """
        await self.settled()
        if self._closed:
            return
        path = self._folder(run.name) / checkpoints.folder_name(key.iteration + 1)
        partial = checkpoints.partial_of(path)
        try:
            await asyncio.to_thread(_make, partial)
            place = Place(run.name, key.iteration, run.snapshot, config.phase_timeout_s)
            await self._mesh.trainer.command(orders.write_checkpoint(str(partial)), place)
            crash_point("coordinator.checkpoint.begun")
        except FAILURES as error:
            await _give_up(partial, error, emit)
            return
        if self._closed:
            return
        manifest = Manifest(
            run=run.name, next_iteration=key.iteration + 1, next_validation=run.next_validation, snapshot=run.snapshot,
            optimizer_step=run.optimizer_step, prompts_consumed=next_ordinal,
            learning_rate_factor=learning_rate_factor(config.optimizer, max(1, run.optimizer_step)), seed=config.seed,
            config=to_plain(config), dtype="", state_dtype="", layout_digest="",
            tensor_parallel=len(self._mesh.trainer.ranks), create_time_s=time.time())
        self._under_way = asyncio.create_task(self._finish(path, manifest, config, emit), name=f"checkpoint-{path.name}")

    async def _finish(self, path: Path, manifest: Manifest, config: RunConfig, emit: Callable[[Note], None]) -> None:
        partial, began = checkpoints.partial_of(path), time.monotonic()
        try:
            layout = await self._written(partial, config.phase_timeout_s)
            crash_point("coordinator.checkpoint.parts_written")
            whole = await asyncio.to_thread(checkpoints.commit, partial, path, Manifest(
                **{name: getattr(manifest, name) for name in Manifest.__slots__} | layout))
        except FAILURES as error:
            await _give_up(partial, error, emit)
            return
        size_bytes = sum(entry.size_bytes for entry in whole.files.values())
        emit(Note("info", "CHECKPOINT_WRITTEN", f"{path}: {len(whole.files)} files, {size_bytes} bytes, "
                                                f"in {time.monotonic() - began:.1f} s beside other work"))
        try:
            await asyncio.to_thread(checkpoints.prune, path.parent, config.checkpoint_keep)
        except OSError as error:
            emit(Note("warning", "CHECKPOINT_NOT_DELETED", f"{path.parent}: {error}"))

    async def _written(self, partial: Path, timeout_s: float) -> dict[str, str]:
        """What all ranks say of their layout, once each has written its part."""
        parts = await self._mesh.trainer.ask_each("WaitCheckpoint", orders.wait_checkpoint(str(partial)), timeout_s)
        found = {(part.layout_digest, part.dtype, part.state_dtype) for part in parts}
        if len(found) != 1:
            raise WrongState(f"ranks of trainer wrote parts of different layouts: {sorted(found)}", reason="LAYOUT_MISMATCH")
        return dict(zip(("layout_digest", "dtype", "state_dtype"), found.pop()))

    async def settled(self) -> None:
        """Until none is under way, well or not. A caller that goes away does not end it."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def close(self) -> None:
        """One that is under way is given up, and none is begun any more; what there is of it is not seen, and deleted by the
        next."""
        self._closed = True
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait([self._under_way])

    async def newest(self, run: str) -> Checkpoint:
        """After the one under way, if any. Raises NotFound; the files are not read."""
        await self.settled()
        for path in await asyncio.to_thread(checkpoints.list_checkpoints, self._folder(run)):
            try:
                return Checkpoint(path, await asyncio.to_thread(checkpoints.read_manifest, path))
            except (DataLoss, BadInput):
                continue
        raise NotFound(f"run {run!r} has no durable checkpoint in {self._root}", reason="CHECKPOINT_NOT_FOUND", run=run)

    async def find(self, run: str, resume: str) -> tuple[Checkpoint | None, list[Note]]:
        """What `resume` (CreateRunRequest) asks for, every byte checked, and what is to be said of damaged ones.

        Raises DataLoss when a path's, or every one of a run's, is damaged, BadInput for a path that is not absolute.
        """
        if resume in FRESH:
            return None, []
        await self.settled()
        if resume != AUTO:
            if not Path(resume).is_absolute():
                raise BadInput(f"resume is {resume!r}; it must be auto, never or an absolute path", reason="BAD_RESUME")
            return Checkpoint(Path(resume), await asyncio.to_thread(checkpoints.verify, Path(resume))), []
        found, problems = await asyncio.to_thread(checkpoints.newest_valid, self._folder(run))
        if found is None and problems:
            raise DataLoss(f"no checkpoint of run {run!r} is intact: {'; '.join(map(str, problems))}. `--resume never` starts "
                           "afresh", reason="CHECKPOINT_NONE_INTACT", run=run)
        return found, [Note("warning", error.reason, f"{error}; an earlier checkpoint is used") for error in problems]

    def _folder(self, run: str) -> Path:
        return checkpoints.run_folder(self._root, run)


def _make(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    checkpoints.discard_partials(partial.parent)
    partial.mkdir()


async def _give_up(partial: Path, error: BaseException, emit: Callable[[Note], None]) -> None:
    if isinstance(error, TimeoutError):
        error = DeadlineExceeded("the parts were not written within run.phase_timeout_s", reason="CHECKPOINT_TIMEOUT")
    reason = error.reason if isinstance(error, RollplexError) else "CHECKPOINT_IO"
    emit(Note("warning", reason, f"no checkpoint was written, the run goes on: {error}"))
    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)


def restored_run(name: str, config_text: str, manifest: Manifest, known: Run | None) -> Run:
    """The run as it was when the checkpoint was begun. Numbers of validations are not used twice."""
    return Run(name, config_text, time.time(), snapshot=manifest.snapshot, next_iteration=manifest.next_iteration,
               next_validation=max(manifest.next_validation, known.next_validation if known else 0),
               optimizer_step=manifest.optimizer_step, prompts_consumed=manifest.prompts_consumed)
