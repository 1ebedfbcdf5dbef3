"""Type "OCR"."""

from __future__ import annotations

from collections.abc import Sequence


def ocr(answer: str, truth: str) -> float:
    """clip(1 - WER, 0, 1); WER is the word-level Levenshtein distance over the number of words of the ground truth."""
    expected, given = truth.split(), answer.split()
    words = max(1, len(expected))
    # The distance is at least the difference of lengths; a runaway answer need not be compared word by word.
    if abs(len(given) - len(expected)) >= words:
        return 0.0
    return max(0.0, 1.0 - edit_distance(expected, given) / words)


def edit_distance(left: Sequence[str], right: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions that turn one into the other (Levenshtein)."""
    row = list(range(len(right) + 1))
    for i, item in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (item != other))
    return row[-1]
