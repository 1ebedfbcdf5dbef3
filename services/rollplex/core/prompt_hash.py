"""One hash over what makes a prompt: the coordinator and every engine compute it, and a difference refuses the prompt."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any


def prompt_hash(token_ids: Any, grids: Sequence[Any], second_per_grid_ts: Any) -> str:
    """sha256 in hex over little-endian bytes, every part preceded by its length.

    token_ids: [P] integers. grids: the pair (image_grid_thw, video_grid_thw), each [n, 3] integers or None.
    second_per_grid_ts: one float64 a video, or None. Lists, numpy arrays and CPU tensors are accepted; None and an empty list
    hash alike. Raises ValueError when `grids` is not a pair or a grid is not [n, 3].
    """
    if len(grids) != 2:
        raise ValueError(f"grids must be the pair (image_grid_thw, video_grid_thw), got {len(grids)} entries")
    digest = hashlib.sha256()
    _add(digest, "q", _flat(token_ids))
    for name, grid in zip(("image_grid_thw", "video_grid_thw"), grids):
        values = _flat(grid)
        if len(values) % 3:
            raise ValueError(f"{name} must be [n, 3], got {len(values)} numbers")
        _add(digest, "q", values)
    _add(digest, "d", _flat(second_per_grid_ts))
    return digest.hexdigest()


def _add(digest: Any, typecode: str, values: list) -> None:
    for code, part in (("q", [len(values)]), (typecode, values)):
        packed = array(code, part)
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(packed.tobytes())


def _flat(values: Any) -> list:
    """Nested array-likes to one flat list, row-major."""
    if values is None:
        return []
    if hasattr(values, "tolist"):
        values = values.tolist()
    flat: list = []
    for value in values:
        if isinstance(value, Iterable) or hasattr(value, "tolist"):
            nested = value.tolist() if hasattr(value, "tolist") else value
            flat.extend(_flat(nested) if isinstance(nested, Iterable) else [nested])
        else:
            flat.append(value)
    return flat
