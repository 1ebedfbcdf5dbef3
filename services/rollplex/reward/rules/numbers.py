"""Numbers as Video-R1 reads them."""

from __future__ import annotations

import math

from rollplex.core.errors import BadInput


def number_in(text: str) -> float | None:
    """`text` without its commas as a float; None where it is no finite number. "1,5" is 15: commas group digits."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def true_number(truth: str) -> float:
    """Raises BadInput when the ground truth is no finite number."""
    number = number_in(truth)
    if number is None:
        raise BadInput(f"the ground truth {truth!r} is not a finite number", reason="GROUND_TRUTH_UNREADABLE")
    return number
