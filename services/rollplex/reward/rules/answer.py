"""Where the answer is, and whether a response has Video-R1's format. Linear in the length of the text."""

from __future__ import annotations

import re

from rollplex.core.errors import BadInput

_THINK_OPEN, _ANSWER_OPEN, _ANSWER_CLOSE = "<think>", "<answer>", "</answer>"
_TURN = re.compile(r"</think>\s*<answer>")


def _inside_tags(text: str) -> str | None:
    """Group 1, stripped, of a search for `<answer>\\s*(.*?)\\s*</answer>` with DOTALL; None where nothing matches.

    The first <answer> wins: where no </answer> follows it, none follows a later one either. The regular expression
    itself takes quadratic time on a response that repeats <answer>, as collapsed policies do.
    """
    _, opened, rest = text.partition(_ANSWER_OPEN)
    inside, closed, _ = rest.partition(_ANSWER_CLOSE)
    return inside.strip() if opened and closed else None


def answer_of(response: str) -> str:
    """The first answer in the response; "" where there is none."""
    return _inside_tags(response) or ""


def truth_of(ground_truth: str | None) -> str:
    """The expected answer, out of its tags where it has some. Raises BadInput when it is missing or empty."""
    if ground_truth is None:
        raise BadInput("the row has no ground truth", reason="GROUND_TRUTH_MISSING")
    inside = _inside_tags(ground_truth)
    truth = ground_truth.strip() if inside is None else inside
    if not truth:
        raise BadInput(f"the ground truth {ground_truth!r} is empty", reason="GROUND_TRUTH_MISSING")
    return truth


def has_format(response: str) -> bool:
    """Whether `<think>.*?</think>\\s*<answer>.*?</answer>` matches the whole response, DOTALL.

    Both gaps match anything, so it is enough that the ends are right and the turn lies between them.
    """
    if not (response.startswith(_THINK_OPEN) and response.endswith(_ANSWER_CLOSE)):
        return False
    return _TURN.search(response, len(_THINK_OPEN), len(response) - len(_ANSWER_CLOSE)) is not None
