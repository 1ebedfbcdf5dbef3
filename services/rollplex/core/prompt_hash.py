"""One hash over what makes a prompt: coordinator and engines compute it, and a difference refuses the prompt."""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import Any


def prompt_hash(
    token_ids: Any, image_grid_thw: Any = None, video_grid_thw: Any = None, second_per_grid_ts: Any = None
) -> str:
    """sha256 in hex over little-endian bytes, every part preceded by its name and count.

    token_ids: [P] integers. image_grid_thw, video_grid_thw: [n, 3] integers. second_per_grid_ts: one number a video,
    hashed as float32, which is how engines hold it. Lists, numpy arrays and CPU tensors are accepted; None and an empty
    array are the same prompt. Raises ValueError when a grid is not [n, 3].
    """
    digest = hashlib.sha256()
    for name, values, typecode in (
        ("tokens", token_ids, "q"),
        ("images", image_grid_thw, "q"),
        ("videos", video_grid_thw, "q"),
        ("seconds", second_per_grid_ts, "f"),
    ):
        flat = _flat(values)
        if name in ("images", "videos") and len(flat) % 3:
            raise ValueError(f"the grid of {name} must be [n, 3], got {len(flat)} numbers")
        packed = array(typecode, flat)
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(f"{name}:{len(flat)};".encode())
        digest.update(packed.tobytes())
    return digest.hexdigest()


def _flat(values: Any) -> list:
    """A scalar, None or nested array-likes as one flat list, row-major."""
    if values is None:
        return []
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (list, tuple, array)):
        return [number for value in values for number in _flat(value)]
    return [values]
