"""Type "numerical"."""

from __future__ import annotations

from rollplex.reward.rules.numbers import number_in, true_number


def numerical(answer: str, truth: str) -> float:
    """1 when both round to the same two decimals, else 0.

    When one has a point or a comma and the other has neither, the answer is wrong whatever its value: "3." is not "3",
    and "1,000" is not "1000", but it is "1000.0". Raises BadInput when the ground truth is no number.
    """
    expected = true_number(truth)
    given = number_in(answer)
    if given is None or _has_separator(answer) != _has_separator(truth):
        return 0.0
    return float(round(expected, 2) == round(given, 2))


def _has_separator(text: str) -> bool:
    return "." in text or "," in text
