"""The benchmark's reward: cheap, the same in every process, and different for the samples of a group.

It is a function of TRL's signature, so Rollplex is served it by `rollplex_client.reward` and TRL calls it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def count_reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """In [0, 1): a hash of the number of tokens. Lengths are prescribed, so every arm and every trainer gets the same."""
    return [(len(ids) * 2654435761 % (1 << 32)) / (1 << 32) for ids in completion_ids]
