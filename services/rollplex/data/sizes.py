"""Which frames of a video are kept, and in what size: qwen-vl-utils' rules on plain numbers."""

from __future__ import annotations

import math

FRAME_FACTOR = 2
"""Frames are kept in multiples of this (the model's temporal patch)."""

MAX_RATIO = 200
"""Longer side over shorter side, at most."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, area in [min_pixels, max_pixels], ratio kept as well as that allows.

    Raises ValueError for a side of zero or a ratio over MAX_RATIO.
    """
    if min(height, width) < 1 or max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"a frame of {width}x{height} pixels is too narrow: its sides may differ by {MAX_RATIO} times at most")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def frame_indices(total_frames: int, source_fps: float, *, fps: float, min_frames: int, max_frames: int) -> list[int]:
    """Indices of the kept frames: uniform from the first to the last, an even count.

    A video of one frame gives that frame twice. `total_frames` must be positive.
    """
    if total_frames < FRAME_FACTOR:
        return [0] * FRAME_FACTOR
    low = math.ceil(min_frames / FRAME_FACTOR) * FRAME_FACTOR
    high = min(max_frames, total_frames) // FRAME_FACTOR * FRAME_FACTOR
    wanted = min(max(total_frames / source_fps * fps, low), high)
    count = max(int(wanted) // FRAME_FACTOR * FRAME_FACTOR, FRAME_FACTOR)
    return [round(step * (total_frames - 1) / (count - 1)) for step in range(count)]


def video_frame_size(
    height: int, width: int, kept_frames: int, *, factor: int, min_pixels: int, max_pixels: int, total_pixels: int
) -> tuple[int, int]:
    """Size of a kept frame. Both ceilings apply, but never below 1.05 * min_pixels, so that a size exists."""
    share = max(min(max_pixels, total_pixels / kept_frames * FRAME_FACTOR), int(min_pixels * 1.05))
    return smart_resize(height, width, factor, min_pixels, int(share))
