"""What a reward function returned, as scores. Whatever is no finite number leaves its sample unscored, never 0."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rollplex.v1.reward_service_pb2 import Score


def batch_scores(returned: Any, count: int) -> list[Score]:
    """The scores of a TRL function: a list, tuple, array or tensor of `count` numbers or Nones."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return [Score(error=f"returned {_brief(returned)} where a list of {count} scores was expected")] * count
    if len(returned) != count:
        return [Score(error=f"returned {len(returned)} scores for {count} samples")] * count
    return [sample_score(value) for value in returned]


def sample_score(returned: Any) -> Score:
    """The score of one sample: a number, None, or verl's dict with "score" whose other numbers become parts."""
    if not isinstance(returned, Mapping):
        return _score(returned, {})
    if "score" not in returned:
        return Score(error=f'returned a dict without "score", with {sorted(map(str, returned))}')
    return _score(returned["score"], {str(key): value for key, value in returned.items() if key != "score"})


def add_parts(scores: Sequence[Score], parts: Sequence[Mapping[str, Any]]) -> None:
    """Adds the finite numbers among `parts` to scores that have a value."""
    for score, named in zip(scores, parts, strict=True):
        if score.HasField("value"):
            score.parts.update(_finite(named))


def _score(value: Any, parts: Mapping[str, Any]) -> Score:
    if value is None:
        return Score(error="the function returned None")
    number = _number(value)
    if number is None:
        return Score(error=f"returned {_brief(value)} where a number was expected")
    if not math.isfinite(number):
        return Score(error=f"returned {number}, which is not finite")
    return Score(value=number, parts=_finite(parts))


def _finite(parts: Mapping[str, Any]) -> dict[str, float]:
    converted = {name: _number(value) for name, value in parts.items()}
    return {name: number for name, number in converted.items() if number is not None and math.isfinite(number)}


def _number(value: Any) -> float | None:
    """Python's numbers (bool is 0 or 1), and NumPy's or torch's arrays of one element; None for anything else."""
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
