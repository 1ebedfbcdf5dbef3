"""What several sections ask of a value. `strict.parse` puts the section's name before the ValueError."""

from __future__ import annotations

import math


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def check_at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite and at least {least}")
