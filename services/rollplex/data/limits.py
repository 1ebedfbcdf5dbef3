"""How much of a file is read, decoded and kept. The operator sets these; a row may ask for less, never for more."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rollplex.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Defaults are Video-R1's (its copy of qwen-vl-utils) where it has one."""

    fps: float = 2.0
    """Frames kept per second of video, before the two bounds below."""
    min_frames: int = 4
    """Frames kept of a video, at least (a shorter video gives what it has)."""
    max_frames: int = 16
    """Frames kept of a video, at most; also the longest list of frame files."""
    video_min_pixels: int = 128 * 28 * 28
    """Height * width of a kept video frame, at least; smaller frames are enlarged."""
    video_max_pixels: int = 128 * 28 * 28
    """Height * width of a kept video frame, at most (as in qwen-vl-utils never under 1.05 * the minimum)."""
    total_pixels: int = 24576 * 28 * 28
    """Pixels of all kept frames of one video; qwen-vl-utils counts a pair of frames once, and so does this."""
    image_min_pixels: int = 4 * 28 * 28
    """Height * width of an image, at least."""
    image_max_pixels: int = 256 * 28 * 28
    """Height * width of an image, at most."""
    max_items: int = 64
    """Images and videos of one prompt."""
    max_file_bytes: int = 2 << 30
    """Size of one media file."""
    max_source_pixels: int = 8192 * 8192
    """Height * width of one frame or image as it is stored."""
    max_source_frames: int = 1_000_000
    """Frames of a video file."""
    max_slab_bytes: int = 1 << 30
    """Decoded bytes of one prompt."""
    decode_timeout_s: float = 60.0
    """Wall time for one prompt's media, waiting for a free child not counted; also the child's CPU time."""
    child_memory_bytes: int = 4 << 30
    """Address space of a decoding child, about 0.25 GB of it for its libraries."""
    processor_image_pixels: tuple[int, int] | None = None
    """The checkpoint's own (min, max) for images, applied after the above (`PromptProcessor.fit_limits`)."""
    processor_video_pixels: tuple[int, int] | None = None
    """The same for a video frame."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise BadInput(f"media limit {field.name} is {value}; it must be positive", reason="BAD_LIMIT")
        for low, high in (
            ("min_frames", "max_frames"),
            ("video_min_pixels", "video_max_pixels"),
            ("image_min_pixels", "image_max_pixels"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise BadInput(f"media limit {low} {getattr(self, low)} is over {high} {getattr(self, high)}", reason="BAD_LIMIT")
        if self.max_frames < 2:
            raise BadInput(f"media limit max_frames is {self.max_frames}; frames are kept in pairs", reason="BAD_LIMIT")
