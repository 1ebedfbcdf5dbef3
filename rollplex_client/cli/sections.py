"""Which dataclass reads which section of the one configuration file, and the two sections of `rollplex train`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

SECTIONS = {
    "mesh": ("rollplex.core.config", "MeshSection"),
    "model": ("rollplex.core.config", "ModelSection"),
    "coordinator": ("rollplex.coordinator.config", "CoordinatorConfig"),
    "broker": ("rollplex.broker.config", "BrokerSection"),
    "rollout": ("rollplex.rollout.config", "RolloutSection"),
    "reference": ("rollplex.reference.config", "ReferenceSection"),
    "trainer": ("rollplex.trainer.config", "TrainerSection"),
    "reward": ("rollplex.reward.config", "RewardConfig"),
    "run": ("rollplex.core.config", "RunConfig"),
    "data": ("rollplex_client.cli.sections", "DataSection"),
    "train": ("rollplex_client.cli.sections", "TrainSection"),
}


def section_class(name: str) -> type:
    module, kind = SECTIONS[name]
    return getattr(importlib.import_module(module), kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """[data]: the rows that `rollplex train` submits."""

    file: Path | None = None
    """Video-R1 JSON, verl parquet or jsonl, or TRL-style conversational rows."""
    heldout: Path | None = None
    """Rows for validations; absent: no validation."""
    media_root: Path | None = None
    """Goes before relative media paths; absent: the data file's folder."""
    format: str = "auto"
    """`auto`, `video-r1`, `verl` or `conversational`."""
    filter_bad_rows: bool = False
    """Leave out rows that cannot be used, counted and listed; false: the first one is an error."""
    require_ground_truth: bool = True
    """Refuse rows without an expected answer."""

    def __post_init__(self) -> None:
        formats = ("auto", "video-r1", "verl", "conversational")
        if self.format not in formats:
            raise ValueError(f"format is {self.format!r}; it must be one of {', '.join(formats)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """[train]: how long `rollplex train` goes on, and what it leaves behind."""

    run: str | None = None
    """Name of the run; absent: made from the time."""
    iterations: int = 100
    groups_per_iteration: int = 8
    """Prompts of an iteration; each is sampled run.sampling.samples_per_group times."""
    validate_every: int = 10
    """Iterations between validations, besides one before the first and one after the last; 0: only those two."""
    shuffle: bool = True
    """A new order of the rows in every epoch, from run.seed."""
    out: Path | None = None
    """Folder of summary.json, metrics.jsonl and report.html; absent: runs/NAME."""
    resume: str = "auto"
    """Where a run begins: `auto`, with the run of that name if it is there, else from its newest intact durable checkpoint, else
    from the model's; `never`: from no durable checkpoint; the folder of a durable checkpoint: from that one."""
    export: Path | None = None
    """Folder for the trained checkpoint; absent: none is written."""

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("groups_per_iteration", 1), ("validate_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
