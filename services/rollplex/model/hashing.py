"""A fingerprint of what an engine understood a prompt to be, so that the coordinator can compare engines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_hash(
    token_ids: Sequence[int] | np.ndarray,
    image_grid_thw: Sequence[Sequence[int]] | np.ndarray | None = None,
    video_grid_thw: Sequence[Sequence[int]] | np.ndarray | None = None,
    second_per_grid_ts: Sequence[float] | np.ndarray | None = None,
) -> str:
    """sha256 hex over token ids, grids and timing; an absent array and an empty one are the same prompt."""
    digest = hashlib.sha256()
    fields = (
        ("tokens", token_ids, "<i8"),
        ("images", image_grid_thw, "<i8"),
        ("videos", video_grid_thw, "<i8"),
        ("seconds", second_per_grid_ts, "<f4"),
    )
    for name, values, dtype in fields:
        array = np.ascontiguousarray(np.asarray([] if values is None else values, dtype=dtype)).reshape(-1)
        digest.update(f"{name}:{array.size};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
