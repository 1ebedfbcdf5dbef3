"""What the coordinator asks of engines and what they answer: the same messages as the protos, without proto or grpc.

Token ids are `array('q')`, log-probabilities `array('f')`: compact, and numpy and torch read them without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.core.placement import Placement
from rollplex.core.response_lengths import LengthDistribution, parse_lengths


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One decoded image or video in a host slab."""

    kind: str
    """`image` or `video`."""
    frames: Placement
    """uint8 [T, H, W, 3], RGB."""
    fps: float = 0.0
    """Frames a second of the kept frames; 0 for an image."""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """A tokenised prompt with its media; see protos/rollplex/v1/types.proto."""

    group_index: int
    token_ids: array
    """int64 [P]."""
    media: tuple[MediaItem, ...] = ()
    prompt_hash: str = ""
    sample_count: int = 1
    prompt_ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    max_response_tokens: int
    greedy: bool = False
    seed: int = 0
    deterministic: bool = False
    length_distribution: str = ""
    """SamplingConfig.length_distribution; where it is set, a sample's length is `lengths.length(seed of the sample)`."""

    @property
    def lengths(self) -> LengthDistribution | None:
        """Raises ValueError for a distribution that is none."""
        return parse_lengths(self.length_distribution, self.max_response_tokens)


@dataclass(frozen=True, slots=True)
class FinishedSample:
    group_index: int
    sample_index: int
    token_ids: array
    """int64 [R]."""
    logprobs: array
    """float32 [R]."""
    finish_reason: str
    """`stop`, `length` or `aborted`."""


@dataclass(frozen=True, slots=True)
class ResponseSample:
    sample_index: int
    token_ids: array
    """int64 [R], R >= 1."""
    rollout_logprobs: array | None = None
    """float32 [R]; likewise below."""
    reference_logprobs: array | None = None
    old_logprobs: array | None = None
    advantage: float = 0.0
    scored: bool = True


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    group_index: int
    samples: tuple[ResponseSample, ...]


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    group_index: int
    sample_index: int
    logprobs: array
    """float32 [R]."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Denominators over a whole mini-batch."""

    sample_count: int
    token_count: int
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class ResidencyEntry:
    object_class: str
    role: str
    device: str
    residency: str
    """A value of rollplex.core.residency.Residency."""
    size_bytes: int
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OpenRunResult:
    actor_slab: str = ""
    actor_bytes: int = 0
    snapshot: int = 0
    parameter_count: int = 0


@dataclass(frozen=True, slots=True)
class BindResult:
    snapshot: int
    bound_parameters: int
    inodes: dict[str, int] = field(default_factory=dict)
    """Device -> inode of the slab that is bound there; several for an engine with several devices."""
    copied_bytes: int = 0
    """Of a replica on devices of its own: what was copied there for this snapshot."""


@dataclass(frozen=True, slots=True)
class QuiesceResult:
    released_bytes: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    prompt_tokens: int
    response_tokens: int
    prefill_s: float
    """In prefill, and in steps that prefill beside decoding."""
    decode_s: float
    """In steps that only decode."""
    prompt_hashes: tuple[str, ...]
    decode_steps: int = 0
    """Steps within decode_s: passes over the weights."""
    decode_rows: int = 0
    """Samples decoded, summed over those steps."""


@dataclass(frozen=True, slots=True)
class PrefixResult:
    prompt_hashes: tuple[str, ...]
    boundary_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class ScoreResult:
    samples: tuple[SampleLogprobs, ...]


@dataclass(frozen=True, slots=True)
class SuffixResult:
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradientResult:
    grad_norm: float
    finite: bool


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """What the trainer is told at UPDATE_BEGIN."""

    update_epoch: int
    clip_coefficient: float
    learning_rate_factor: float
    optimizer_step: int
    skip: bool = False


@dataclass(frozen=True, slots=True)
class UpdateResult:
    chunk_count: int
    state_bytes: int
    peak_state_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What a trainer rank has written of a durable checkpoint."""

    size_bytes: int
    layout_digest: str
    dtype: str
    state_dtype: str


class WorkContext(Protocol):
    """What an engine's long work reports to, and asks whether to go on. The chassis supplies it."""

    def progress(self, done_count: int, total_count: int, unit: str) -> None:
        """How far the work is."""

    def samples(self, samples: Sequence[FinishedSample]) -> None:
        """Hands out samples that have finished."""

    @property
    def aborted(self) -> bool:
        """Whether somebody asked for an end."""

    def check(self) -> None:
        """Raises Aborted or DeadlineExceeded when the work should end; call it between units."""
