"""Type "multiple choice"."""

from __future__ import annotations


def multiple_choice(answer: str, truth: str) -> float:
    """1 when both are the same text, case and punctuation included; else 0."""
    return float(answer == truth)
