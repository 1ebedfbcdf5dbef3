"""Decoded media of one prompt: one sealed memfd and the list of what lies in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ALIGN_BYTES = 64
"""Every item starts at a multiple of this."""

# F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE: the bytes are final. The last one, unlike
# F_SEAL_WRITE, lets kernels before 6.7 map the slab shared and read-only; Python 3.11's fcntl has no name for it.
SLAB_SEALS = 0x1 | 0x2 | 0x4 | 0x10


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image or video inside a prompt's slab."""

    kind: str
    """"image" or "video"."""
    offset_bytes: int
    shape: tuple[int, int, int, int]
    """uint8 [T, H, W, 3], RGB, contiguous; an image has T = 1."""
    fps: float | None
    """Kept frames per second of source: kept / source_frames * source rate. None for an image."""
    timestamps_s: tuple[float, ...]
    """When each kept frame is shown; empty for an image."""
    source_frames: int
    source_duration_s: float | None
    """None for an image."""
    sha256: str
    """Hex, over the item's bytes."""

    @property
    def size_bytes(self) -> int:
        frames, height, width, channels = self.shape
        return frames * height * width * channels

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MediaItem:
        """The inverse of `to_json`, lists made tuples. Raises TypeError for missing or unknown keys."""
        return cls(**{**value, "shape": tuple(value["shape"]), "timestamps_s": tuple(value["timestamps_s"])})


class DecodedMedia:
    """Owns the memfd until `release` or `close`; a context manager."""

    def __init__(self, fd: int, size_bytes: int, items: Sequence[MediaItem]) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.items = tuple(items)

    def release(self) -> int:
        """Hand the fd over: the caller closes it from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.release())

    def __enter__(self) -> DecodedMedia:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def view_frames(fd: int, size_bytes: int, items: Sequence[MediaItem]) -> list[np.ndarray]:
    """Read-only uint8 [T, H, W, 3] views of one shared mapping, which lives as long as a view; `fd` may be closed.

    Raises ValueError when an item does not lie inside `size_bytes`.
    """
    import numpy as np

    for position, item in enumerate(items):
        if item.offset_bytes < 0 or item.offset_bytes + item.size_bytes > size_bytes:
            raise ValueError(
                f"media item {position} spans bytes {item.offset_bytes}..{item.offset_bytes + item.size_bytes} "
                f"of a slab of {size_bytes}"
            )
    mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return [np.frombuffer(mapping, np.uint8, item.size_bytes, item.offset_bytes).reshape(item.shape) for item in items]
