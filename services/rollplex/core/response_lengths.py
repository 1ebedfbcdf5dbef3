"""Response lengths that a benchmark prescribes, because random weights never end a response by themselves.

A length is a function of the sample's seed and nothing else: every engine, schedule and trainer that is given the same seeds
decodes the same number of tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

SIGMA = 0.8
"""Of the underlying normal: a long tail, as responses have; the 99th percentile is 4.7 times the mean before clipping."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths, rounded and clipped to [1, longest]."""

    mean: float
    """Tokens, before clipping; clipping lowers it a little."""
    longest: int

    def length(self, seed: int) -> int:
        """Tokens of the sample with that seed (`rollplex.core.ids.sample_seed`)."""
        # Of Python's draws, random() alone is promised to be the same in every version.
        quantile = max(random.Random(seed).random(), 2.0**-54)
        drawn = math.exp(math.log(self.mean) - SIGMA**2 / 2 + SIGMA * NormalDist().inv_cdf(quantile))
        return min(max(1, round(drawn)), self.longest)


def parse_lengths(text: str, max_response_tokens: int) -> LengthDistribution | None:
    """`lognormal:MEAN:MAX`; None for the empty string. Raises ValueError for anything else, and for a MAX over the limit."""
    if not text:
        return None
    kind, *numbers = text.split(":")
    try:
        mean, longest = float(numbers[0]), int(numbers[1])
        known = kind == "lognormal" and len(numbers) == 2 and 1 <= mean < math.inf
    except (ValueError, IndexError):
        known = False
    if not known:
        raise ValueError(f"length_distribution is {text!r}; it must be empty or lognormal:MEAN:MAX in tokens, MEAN at least 1")
    if not 1 <= longest <= max_response_tokens:
        raise ValueError(f"length_distribution {text!r} goes up to {longest} tokens; that must be between 1 and "
                         f"max_response_tokens, {max_response_tokens}")
    return LengthDistribution(mean, longest)
