"""Durable checkpoints on disk: a folder of files and a manifest that is written last and checks all of them, and itself.

    FOLDER/RUN/iteration-000002/        after two iterations
        manifest.json                   what was trained so far, and size and sha256 of every other file
        weights/                        the snapshot, as a Hugging Face directory
        master.safetensors, exp_avg.safetensors, exp_avg_sq.safetensors
                                        optimizer state, whole parameters under their training names

A folder is written as `.iteration-000002.partial` and renamed when everything in it is on disk. Of an interrupted one only the
partial folder is left, which nobody reads. docs/checkpoints.md describes it for users.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, DataLoss
from rollplex.core.ids import check_run_name

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights"
STATE_FILES = ("master.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors")
"""In the order of a slot's rows: master weights, first and second moment."""
_NAME = re.compile(r"iteration-(\d{6,})")
_SELF = "manifest_sha256"
_HASH_THREADS = 4
"""sha256 runs without the interpreter's lock; files are hashed side by side."""
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is needed to go on, beside the tensors."""

    run: str
    next_iteration: int
    """Iterations done; the one that comes next has this number."""
    next_validation: int
    snapshot: int
    optimizer_step: int
    """Updates applied: the learning-rate schedule and Adam's bias correction count them."""
    prompts_consumed: int
    """The sampler's cursor: the ordinal of the next prompt. With `seed`, iteration and sample it seeds every response."""
    learning_rate_factor: float
    """Of the schedule at `optimizer_step`."""
    seed: int
    config: dict[str, Any]
    """The run's RunConfig."""
    dtype: str
    """Of the snapshot."""
    state_dtype: str
    """Of master weights and moments."""
    layout_digest: str
    """sha256 over names and shapes of all parameters and which of them are trained: independent of any degree."""
    tensor_parallel: int
    """Trainer ranks that wrote it; any number may read it."""
    create_time_s: float
    files: dict[str, FileEntry] = field(default_factory=dict)
    """By path in the folder."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    manifest: Manifest


def folder_name(next_iteration: int) -> str:
    return f"iteration-{next_iteration:06d}"


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is there."""
    return path.with_name(f".{path.name}.partial")


def layout_digest(shapes: Mapping[str, Iterable[int]], trained: Iterable[str], dtype: str) -> str:
    """`shapes`: of whole parameters, without vocabulary padding, by training name."""
    text = json.dumps([{name: list(shape) for name, shape in shapes.items()}, sorted(trained), dtype], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The one text of a manifest; its own sha256 is over the text without it."""
    body = dataclasses.asdict(manifest)
    return _dump({**body, _SELF: hashlib.sha256(_dump(body)).hexdigest()})


def decode(raw: bytes) -> Manifest:
    """Raises DataLoss for anything but the very bytes that `encode` gives, BadInput for a format of another version."""
    try:
        body = json.loads(raw)
        claimed = body.pop(_SELF)
        intact = _dump({**body, _SELF: claimed}) == raw and hashlib.sha256(_dump(body)).hexdigest() == claimed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DataLoss(f"{MANIFEST} is torn or altered", reason="CHECKPOINT_CORRUPT", file=MANIFEST)
    if body.get("format") != FORMAT:
        raise BadInput(f"the checkpoint has format {body.get('format')}; this Rollplex reads {FORMAT}",
                       reason="CHECKPOINT_FORMAT")
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(**body, files=files)


def _dump(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(path: Path) -> Manifest:
    """Of a checkpoint, without looking at its other files. Raises DataLoss."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise DataLoss(f"{path} has no readable {MANIFEST}: {error.strerror}", reason="CHECKPOINT_INCOMPLETE",
                       file=MANIFEST) from error
    try:
        return decode(raw)
    except DataLoss as error:
        raise DataLoss(f"{path}: {error}", reason=error.reason, file=MANIFEST) from error


def verify(path: Path) -> Manifest:
    """Reads every byte. Raises DataLoss naming the first file that is missing, cut, altered or not the checkpoint's."""
    manifest = read_manifest(path)
    found = _files_of(path)
    for name, entry in manifest.files.items():
        if name not in found:
            raise DataLoss(f"{path}: {name} is missing", reason="CHECKPOINT_INCOMPLETE", file=name)
        if found[name] != entry.size_bytes:
            raise DataLoss(f"{path}: {name} has {found[name]} bytes; {entry.size_bytes} were written",
                           reason="CHECKPOINT_CORRUPT", file=name)
    for name in found.keys() - manifest.files.keys() - {MANIFEST}:
        raise DataLoss(f"{path}: {name} does not belong to it", reason="CHECKPOINT_CORRUPT", file=name)
    for name, digest in _digests(path, manifest.files):
        if digest != manifest.files[name].sha256:
            raise DataLoss(f"{path}: the bytes of {name} are not those that were written", reason="CHECKPOINT_CORRUPT",
                           file=name)
    return manifest


def commit(partial: Path, path: Path, manifest: Manifest) -> Manifest:
    """Hashes what lies in `partial`, writes the manifest, and makes the checkpoint appear at `path`, all of it on disk first.

    Raises OSError; nothing is visible then.
    """
    sizes = _files_of(partial)
    sizes.pop(MANIFEST, None)
    files = {name: FileEntry(size_bytes=sizes[name], sha256=digest) for name, digest in _digests(partial, sizes)}
    whole = dataclasses.replace(manifest, files=dict(sorted(files.items())))
    with (partial / MANIFEST).open("wb") as file:
        file.write(encode(whole))
    for name in [*files, MANIFEST]:
        sync(partial / name)
    for folder in sorted({(partial / name).parent for name in files} | {partial}, reverse=True):
        sync(folder)
    crash_point("coordinator.checkpoint.manifest_written")
    if path.exists():
        discard(path)
    partial.replace(path)
    sync(path.parent)
    crash_point("coordinator.checkpoint.visible")
    return whole


def sync(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(folder: Path) -> list[Path]:
    """Of one run, newest first; whether they are intact is not looked at."""
    if not folder.is_dir():
        return []
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()}
    return [found[number] for number in sorted(found, reverse=True)]


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[DataLoss | BadInput]]:
    """The newest intact checkpoint of a run, and what is wrong with those that are newer."""
    problems: list[DataLoss | BadInput] = []
    for path in list_checkpoints(folder):
        try:
            return Checkpoint(path, verify(path)), problems
        except (DataLoss, BadInput) as error:
            problems.append(error)
    return None, problems


def prune(folder: Path, keep: int) -> list[Path]:
    """Takes all but the newest `keep` checkpoints away, and what broke off; returns what went. Call it when none is written."""
    gone = list_checkpoints(folder)[keep:]
    for path in gone:
        discard(path)
    discard_partials(folder)
    return gone


def discard_partials(folder: Path) -> None:
    """What earlier attempts have left half done."""
    for path in folder.glob(".iteration-*.partial"):
        shutil.rmtree(path)


def discard(path: Path) -> None:
    """Out of sight first: a folder that is half deleted is no checkpoint."""
    aside = partial_of(path)
    if aside.exists():
        aside = aside.with_name(f".iteration-{os.getpid()}-{path.name}.partial")
    path.rename(aside)
    shutil.rmtree(aside)


def run_folder(root: Path, run: str) -> Path:
    return root / check_run_name(run)


def _files_of(path: Path) -> dict[str, int]:
    """Size by path in the folder; links are nobody's files."""
    found: dict[str, int] = {}
    pending = [(path, "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                else:
                    found[prefix + entry.name] = entry.stat(follow_symlinks=False).st_size
    return found


def _digests(path: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, sha256), in order."""
    names = list(names)
    if sum((path / name).stat().st_size for name in names) <= _READ_BYTES:
        yield from ((name, hashlib.sha256((path / name).read_bytes()).hexdigest()) for name in names)
        return
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="checkpoint-hash") as pool:
        yield from zip(names, pool.map(lambda name: _digest(path / name), names))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
