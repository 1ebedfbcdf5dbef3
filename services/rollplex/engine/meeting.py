"""Where the ranks of one epoch find each other: a directory with a file a rank. No torch; a tensor-parallel group never
leaves its node."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollplex.core.errors import DeadlineExceeded
from rollplex.core.ids import new_id

_INSTANCE = new_id("instance")
"""Of this process: a rank that was replaced never meets under its predecessor's name."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Attendance:
    """One rank's file."""

    rank: int
    pid: int
    started: int
    """Clock ticks from boot to the process's start: tells a pid's next owner apart."""
    instance: str

    @property
    def alive(self) -> bool:
        return _start_of(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Meeting:
    """Everybody of an epoch is there. `folder` is this meeting's alone."""

    folder: Path
    attendances: tuple[Attendance, ...]

    def note(self, kind: str, rank: int, text: str) -> None:
        """Leaves a word for the others."""
        _write(self.folder / f"{kind}-{rank}", text)

    def read(self, kind: str, rank: int) -> str:
        """What a rank left; empty when nothing."""
        file = self.folder / f"{kind}-{rank}"
        return file.read_text() if file.is_file() else ""


def meet(folder: Path, epoch: int, rank: int, size: int, *, timeout_s: float, go_on: Callable[[], None]) -> Meeting:
    """Waits in `folder` until all ranks are in `epoch`. `go_on` is called meanwhile and may raise.

    Raises DeadlineExceeded naming the ranks that did not come. What a former mesh left in the folder does not count: its
    processes are gone.
    """
    place = folder / str(epoch)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = Attendance(rank, os.getpid(), _start_of(os.getpid()), _INSTANCE)
    _write(place / f"rank-{rank}", json.dumps([mine.pid, mine.started, mine.instance]))
    deadline = time.monotonic() + timeout_s
    while True:
        there = [found for found in (_attendance(place, index) for index in range(size)) if found is not None]
        if len(there) == size:
            break
        if time.monotonic() > deadline:
            missing = ", ".join(str(index) for index in set(range(size)) - {found.rank for found in there})
            raise DeadlineExceeded(f"rank {missing} did not come to epoch {epoch} within {timeout_s:g} s",
                                   reason="RANK_MISSING", rank=missing, epoch=epoch)
        go_on()
        # A directory announces nothing without inotify, and ranks come together within milliseconds.
        time.sleep(_POLL_S)
    name = hashlib.sha256("".join(found.instance for found in there).encode()).hexdigest()[:16]
    (place / name).mkdir(mode=0o700, exist_ok=True)
    if rank == 0:
        _forget_earlier(folder, epoch)
    return Meeting(place / name, tuple(there))


def _attendance(place: Path, rank: int) -> Attendance | None:
    file = place / f"rank-{rank}"
    if not file.is_file():
        return None
    found = Attendance(rank, *json.loads(file.read_text()))
    return found if found.alive else None


def _start_of(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    state, *fields = status.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def _forget_earlier(folder: Path, epoch: int) -> None:
    for place in folder.iterdir():
        if place.name.isdigit() and int(place.name) < epoch:
            shutil.rmtree(place, ignore_errors=True)
