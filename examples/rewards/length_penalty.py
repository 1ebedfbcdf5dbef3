"""A reward in TRL's signature: DAPO's soft punishment of overlong responses (arXiv 2503.14476, equation 13).

    python examples/rewards/length_penalty.py unix:/tmp/my-rewards/length.sock
"""

from __future__ import annotations

import sys

MAX_TOKENS = 512
CACHE_TOKENS = 128


def length_penalty(completion_ids: list[list[int]], completions: list, log_metric=None, **columns) -> list[float]:
    """0 up to MAX_TOKENS - CACHE_TOKENS tokens, then linearly down to -1 at MAX_TOKENS, -1 beyond."""
    lengths = [len(ids) for ids in completion_ids]
    if log_metric is not None:
        log_metric("longest_tokens", max(lengths))
    return [max(-1.0, min(0.0, (MAX_TOKENS - CACHE_TOKENS - length) / CACHE_TOKENS)) for length in lengths]


if __name__ == "__main__":
    from rollplex_client.reward import serve_reward

    serve_reward(length_penalty, sys.argv[1])
