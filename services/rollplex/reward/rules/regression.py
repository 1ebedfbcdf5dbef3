"""Type "regression"."""

from __future__ import annotations

from rollplex.reward.rules.numbers import number_in, true_number

EPSILON = 1e-9


def regression(answer: str, truth: str) -> float:
    """1 - clip((|answer - truth| + 1e-9) / (|truth| + 1e-9), 0, 1); 0 for an answer that is no number.

    By this formula a ground truth of 0 gives 0 to every answer, the right one too. Raises BadInput when the ground
    truth is no number.
    """
    expected = true_number(truth)
    given = number_in(answer)
    if given is None:
        return 0.0
    return 1.0 - min(1.0, (abs(given - expected) + EPSILON) / (abs(expected) + EPSILON))
