"""What the coordinator keeps: runs, iterations, samples, events. Plain data; journal.py stores it, servicer.py translates it."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rollplex.data.rows import MediaRef, PromptRow


class RunState(StrEnum):
    OPENING = "opening"
    ACTIVE = "active"
    RECOVERING = "recovering"
    """An update was begun and is not published: it is rolled forward before anything else."""
    CLOSED = "closed"
    FAILED = "failed"


class IterationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (IterationState.DONE, IterationState.FAILED, IterationState.CANCELLED)


@dataclass(slots=True)
class Run:
    name: str
    config_json: str
    create_time_s: float
    """Seconds since the epoch; likewise below."""
    state: RunState = RunState.OPENING
    snapshot: int = 0
    next_iteration: int = 0
    next_validation: int = 0
    optimizer_step: int = 0
    """Updates done; the learning-rate schedule counts them."""
    prompts_consumed: int = 0
    """Prompts of all iterations so far: the ordinal of the next one."""
    last_sequence: int = 0
    replay_iterations: int = 0
    """Of a run that replays another one: how many iterations that one had done."""


@dataclass(frozen=True, slots=True)
class IterationKey:
    run: str
    iteration: int
    validation: bool = False

    def __str__(self) -> str:
        kind = "validation" if self.validation else "iteration"
        return f"runs/{self.run}/{kind}s/{self.iteration}"


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    kind: str
    """Name of a class of rollplex.core.errors."""
    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Iteration:
    key: IterationKey
    request_id: str
    create_time_s: float
    first_ordinal: int
    """Ordinal in the run of its first prompt."""
    state: IterationState = IterationState.QUEUED
    recorded: int = -1
    """Iteration of the recorded run that it replays; -1 in a run that replays none."""
    snapshot: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    error: ErrorRecord | None = None
    end_time_s: float | None = None


@dataclass(slots=True)
class SampleRecord:
    group_index: int
    sample_index: int
    token_ids: array
    logprobs: array
    finish_reason: str
    text: str = ""
    reward: float | None = None
    """Weighted sum; None: unscored, or not yet."""
    advantage: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    scored: bool = False
    """The rewards have had their say, with or without a value: it is not asked for again."""
    reference_logprobs: array | None = None
    """float32 [R]; likewise below. None: not computed yet, or not needed."""
    old_logprobs: array | None = None
    asked: bool = False
    """This coordinator has handed it to the rewards. Not kept."""

    @property
    def whole(self) -> bool:
        """Not cut off by an abort."""
        return self.finish_reason != "aborted"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A span of work began or ended."""

    phase: str
    span: str
    ended: bool
    start_s: float
    """Since the iteration began."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProgressReport:
    samples_done: int
    samples_total: int
    samples_scored: int
    response_tokens: int
    reward_mean: float | None = None


@dataclass(frozen=True, slots=True)
class StateChange:
    """The iteration as it is now."""

    iteration: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    level: str
    reason: str
    message: str


EventBody = PhaseSpan | ProgressReport | StateChange | Note
EVENT_KINDS: dict[str, type] = {"phase": PhaseSpan, "progress": ProgressReport, "state": StateChange, "note": Note}


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    time_s: float
    iteration: int
    """-1 for the run itself."""
    validation: bool
    body: EventBody


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """UPDATE_BEGIN: enough to roll the update forward after any death."""

    iteration: int
    mini_batch: int
    mini_batch_count: int
    snapshot: int
    """Being replaced."""
    optimizer_step: int
    clip_coefficient: float
    learning_rate_factor: float
    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The iteration's, up to here: what a successor goes on with."""


@dataclass(frozen=True, slots=True)
class RewardRegistration:
    name: str
    address: str
    weight: float = 1.0
    timeout_s: float = 30.0
    retries: int = 6


def iteration_from_json(body: dict[str, Any]) -> Iteration:
    """The inverse of dataclasses.asdict."""
    return Iteration(**{**body, "key": IterationKey(**body["key"]), "state": IterationState(body["state"]),
                        "error": ErrorRecord(**body["error"]) if body["error"] else None})


def row_to_json(row: PromptRow) -> dict[str, Any]:
    return asdict(row)


def row_from_json(value: dict[str, Any]) -> PromptRow:
    media = tuple(MediaRef(**{**item, "frames": tuple(item["frames"])}) for item in value["media"])
    return PromptRow(**{**value, "media": media})
