"""What the coordinator answers, as frozen dataclasses. Times are aware datetimes, spans are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rollplex.core.errors import RollplexError

RunState = Literal["opening", "active", "recovering", "closed", "failed"]
IterationState = Literal["queued", "running", "done", "failed", "cancelled"]
PhaseName = Literal["idle", "overlap", "suffix", "update"]

ENDED_STATES = frozenset({"done", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    state: RunState
    config: dict[str, Any]
    """`rollplex.core.config.RunConfig` as plain JSON values."""
    snapshot: int
    next_iteration: int
    create_time: datetime | None
    last_sequence: int
    replay_iterations: int = 0
    """Of a run that replays another one: how many iterations that one had done."""


@dataclass(frozen=True, slots=True)
class Iteration:
    run: str
    iteration: int
    validation: bool
    state: IterationState
    snapshot: int
    """The snapshot that was sampled from."""
    metrics: dict[str, float]
    """By name, see docs/metrics.md; complete when `state` is "done"."""
    error: RollplexError | None
    """Set when `state` is "failed"."""
    create_time: datetime | None
    end_time: datetime | None

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True)
class IterationHandle:
    """A submitted iteration or validation: what `wait`, `cancel` and `list_samples` take."""

    run: str
    iteration: int
    validation: bool
    after_sequence: int
    """Its events have larger sequence numbers."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A span of work began or ended."""

    phase: PhaseName
    span: str
    """`overlap`, `generate`, `reference_prefix`, `trainer_prefix`, `reward`, `score`, `suffix`, `update`, ..."""
    ended: bool
    start_s: float
    """Seconds since the iteration began."""
    duration_s: float
    """0 when it began."""


@dataclass(frozen=True, slots=True)
class Progress:
    samples_done: int
    samples_total: int
    samples_scored: int
    response_tokens: int
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class Note:
    level: Literal["info", "warning", "error"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    """Position in the run's event log, from 1, without gaps."""
    time: datetime | None
    iteration: int
    """-1: the run itself."""
    validation: bool
    body: PhaseSpan | Progress | Iteration | Note


@dataclass(frozen=True, slots=True)
class Sample:
    group_index: int
    sample_index: int
    response_text: str
    token_ids: tuple[int, ...]
    reward: float | None
    """None: unscored."""
    advantage: float | None
    finish_reason: str
    parts: dict[str, float]
    """Rewards by name and part: "video_r1", "video_r1/accuracy", ..."""


@dataclass(frozen=True, slots=True)
class Reward:
    name: str
    address: str
    weight: float
    timeout_s: float
    retries: int
    reachable: bool | None = None
    """None where it was not asked."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    address: str
    health: str
    """`SERVING`, `NOT_SERVING` or `UNREACHABLE`."""
    pid: int
    """0 when unreachable."""
    bound_snapshot: int
    """-1 when none."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    object_class: str
    role: str
    device: str
    phase: PhaseName | Literal[""]
    """Empty in entries of now."""
    size_bytes: int
    slab_count: int
    residency: Literal["hbm", "pinned", "discarded", ""] = ""
    """Where the bytes are: in the device's memory, or parked in the host's."""


@dataclass(frozen=True, slots=True)
class Mesh:
    services: tuple[Service, ...]
    open_run: str
    phase: PhaseName
    ledger: tuple[LedgerEntry, ...] = field(default=())
    """Now."""
    ledger_peaks: tuple[LedgerEntry, ...] = field(default=())
    """Largest bytes by phase since the run began."""
    host_slab_bytes: int = 0
    host_limit_bytes: int = 0
    """0: no limit."""
    custody: dict[str, int] = field(default_factory=dict)
    """How many `slabs`, `leases`, `sessions`, `former_sessions` and `tickets` the broker keeps now."""


@dataclass(frozen=True, slots=True)
class Export:
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DurableCheckpoint:
    path: str
    """On the coordinator's node."""
    next_iteration: int
    """Iterations that were done."""
    snapshot: int
