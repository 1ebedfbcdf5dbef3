"""[run.sampling]."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.core.config.checks import check_at_least
from rollplex.core.response_lengths import parse_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    samples_per_group: int = 8
    """N, at least 2: a group of one has no advantage."""
    temperature: float = 1.0
    """Softmax temperature, > 0; applied by rollout and trainer alike."""
    max_response_tokens: int = 512
    top_p: float = 1.0
    """Must be 1: truncated sampling biases the ratio unless it is masked on both sides."""
    top_k: int = 0
    """Must be 0, for the same reason."""
    length_distribution: str = ""
    """For benchmarks with random weights, which never end a response: `lognormal:MEAN:MAX` gives every sample a length of its
    own, drawn from its seed, and end tokens do not end it. Empty: responses end as they do. Validations are not affected."""

    def __post_init__(self) -> None:
        check_at_least("samples_per_group", self.samples_per_group, 2)
        check_at_least("max_response_tokens", self.max_response_tokens, 1)
        parse_lengths(self.length_distribution, self.max_response_tokens)
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(f"top_p {self.top_p} and top_k {self.top_k} truncate the distribution that is trained "
                             "on; use top_p = 1 and top_k = 0")
