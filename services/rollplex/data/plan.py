"""What a row asks of the decoder, within the operator's limits, as plain numbers for the child."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.data.limits import MediaLimits
from rollplex.data.rows import MediaRef


def request(media: Sequence[MediaRef], limits: MediaLimits, factor: int) -> dict[str, Any]:
    """The request that goes to a decoding child. Raises BadInput when a row asks for more than `limits` gives."""
    if not media:
        raise BadInput("no media to decode: a text prompt has no slab", reason="NO_MEDIA")
    if len(media) > limits.max_items:
        raise BadInput(
            f"the prompt has {len(media)} media, the limit is {limits.max_items} (max_items)",
            reason="MEDIA_TOO_LARGE",
            media=len(media),
            limit=limits.max_items,
        )
    return {
        "items": [_item(entry, limits, factor) for entry in media],
        "max_slab_bytes": limits.max_slab_bytes,
        "decode_timeout_s": limits.decode_timeout_s,
        "child_memory_bytes": limits.child_memory_bytes,
    }


def _item(entry: MediaRef, limits: MediaLimits, factor: int) -> dict[str, Any]:
    video = entry.kind == "video"
    low, high = (
        (limits.video_min_pixels, limits.video_max_pixels) if video else (limits.image_min_pixels, limits.image_max_pixels)
    )
    max_pixels = _ask(entry, "max_pixels", high, high)
    min_pixels = _ask(entry, "min_pixels", min(low, max_pixels), max_pixels)
    plan = {
        "kind": entry.kind,
        "files": len(entry.paths),
        "frame_files": bool(entry.frames),
        "factor": factor,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "max_source_pixels": limits.max_source_pixels,
        "processor_pixels": limits.processor_video_pixels if video else limits.processor_image_pixels,
    }
    if video:
        max_frames = _ask(entry, "max_frames", limits.max_frames, limits.max_frames)
        plan |= {
            "fps": _ask(entry, "fps", limits.fps, math.inf),
            "max_frames": max_frames,
            "min_frames": _ask(entry, "min_frames", min(limits.min_frames, max_frames), max_frames),
            "total_pixels": _ask(entry, "total_pixels", limits.total_pixels, limits.total_pixels),
            "max_source_frames": limits.max_source_frames,
        }
        if len(entry.frames) > max_frames:
            raise BadInput(
                f"a video is given as {len(entry.frames)} frame files ({entry.frames[0]}, ...), "
                f"the limit is {max_frames} (max_frames)",
                reason="MEDIA_TOO_LARGE",
                path=entry.frames[0],
                frames=len(entry.frames),
                limit=max_frames,
            )
    return plan


def _ask(entry: MediaRef, name: str, default: float, ceiling: float) -> float:
    """The row's own value of `name` when it has one."""
    value = getattr(entry, name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BadInput(f"{entry.paths[0]}: {name} is {value!r}; it must be a positive number", reason="MEDIA_BAD_OPTION")
    if value > ceiling:
        raise BadInput(
            f"{entry.paths[0]}: the row asks for {name} {value}, at most {ceiling} is allowed; "
            "raise the media limit or lower the row's value",
            reason="MEDIA_TOO_LARGE",
            path=entry.paths[0],
            asked=value,
            limit=ceiling,
        )
    return value
