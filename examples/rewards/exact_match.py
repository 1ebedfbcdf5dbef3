"""A reward in verl's signature: whether the text in the last \\boxed{} or <answer> is the ground truth.

    python -m rollplex_client.reward examples/rewards/exact_match.py --address unix:/tmp/exact/reward.sock --name exact_match
"""

from __future__ import annotations

import re

ANSWER = re.compile(r"\\boxed\{([^{}]*)\}|<answer>(.*?)</answer>", re.DOTALL)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """1 for the same text, white space and case aside; 0 for another or none; None where there is no ground truth."""
    if ground_truth is None:
        return None
    found = ANSWER.findall(solution_str)
    answer = "".join(found[-1]) if found else ""
    return {"score": float(_plain(answer) == _plain(ground_truth)), "answered": bool(found)}


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
