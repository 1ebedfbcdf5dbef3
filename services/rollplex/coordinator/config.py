"""The options of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollplex.data.limits import MediaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """[coordinator]."""

    journal: Path | None = None
    """SQLite file; absent: `journal.sqlite` in the runtime directory."""
    journal_full_wait_s: float = 30.0
    """How long a write to the journal waits for room on a full disk before the call or iteration that needs it fails. What has
    happened already is waited for as long as it takes."""
    replay_journal: Path | None = None
    """Another mesh's journal, in which runs to be replayed are looked up after this mesh's own."""
    checkpoints: Path | None = None
    """Folder of durable checkpoints, a subfolder a run; absent: `checkpoints` in the runtime directory."""
    media_roots: tuple[Path, ...] = ()
    """Media paths of prompts must lie inside one of these, symlinks resolved; empty: no media is read."""
    decode_workers: int = 1
    """Processes that decode media."""
    media: MediaLimits = field(default_factory=MediaLimits)
    builtin_reward: str = "video_r1"
    """Registers the mesh's own reward service under this name; empty: only rewards that clients register."""
    builtin_reward_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.decode_workers < 1:
            raise ValueError(f"decode_workers is {self.decode_workers}; it must be at least 1")
        if not self.journal_full_wait_s >= 0:
            raise ValueError(f"journal_full_wait_s is {self.journal_full_wait_s}; it must be at least 0")
