"""Images and videos to resized RGB frames. Runs only in the decoding child, on files that nobody has vouched for."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image, ImageOps

from rollplex.data.sizes import FRAME_FACTOR, frame_indices, smart_resize, video_frame_size

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Demuxers that read one file and nothing else: playlists (hls, concat, dash) would open what the file names.
VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,gif,apng,ogg,asf,h264,hevc,ivf,m4v"
PILLOW_ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error)
"""What Pillow's plugins raise on broken files."""
SEEK_WORTH_FRAMES = 48
"""A gap shorter than this is decoded through rather than sought over."""

_LENIENT = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
"""A title that is no UTF-8 makes no video unreadable; PyAV 19 knows no other way."""

Image.MAX_IMAGE_PIXELS = None  # Sizes are checked against the request's own limit instead.


class MediaFault(Exception):
    """The file is at fault. `file` counts the files of the item; the parent knows their paths."""

    def __init__(self, reason: str, what: str, *, file: int = 0, **numbers: object) -> None:
        super().__init__(what)
        self.reason, self.what, self.file, self.numbers = reason, what, file, numbers


@dataclass(frozen=True)
class Clip:
    """Kept frames of one item, resized, uint8 [H, W, 3] each, with their timing."""

    frames: list[np.ndarray]
    fps: float | None
    timestamps_s: list[float]
    source_frames: int
    source_duration_s: float | None


def decode(plan: dict[str, Any], files: list[int], room_bytes: int) -> Clip:
    """One item. `plan` is one of plan.request's items; `room_bytes` is what the slab can take. Raises MediaFault."""
    if plan["kind"] == "image":
        return Clip([_image(plan, files[0], 0, None, room_bytes)], None, [], 1, None)
    if plan["frame_files"]:
        return _frame_files(plan, files, room_bytes)
    return _Video(plan, files[0]).clip(room_bytes)


def _frame_files(plan: dict[str, Any], files: list[int], room_bytes: int) -> Clip:
    frames: list[np.ndarray] = []
    kept = math.ceil(len(files) / FRAME_FACTOR) * FRAME_FACTOR
    for number, fd in enumerate(files):
        size = frames[0].shape[:2] if frames else None
        frames.append(_image(plan, fd, number, size, room_bytes // kept, kept))
    times = [number / plan["fps"] for number in range(len(files))]
    while len(frames) < kept:
        frames.append(frames[-1])
        times.append(times[-1])
    return Clip(frames, plan["fps"], times, len(files), len(files) / plan["fps"])


def _image(
    plan: dict[str, Any], fd: int, number: int, size: tuple[int, int] | None, room_bytes: int, kept_frames: int = 1
) -> np.ndarray:
    """One image file as uint8 [H, W, 3]; `size` (height, width) overrides the plan's own."""
    try:
        with os.fdopen(os.dup(fd), "rb") as file, Image.open(file, formats=IMAGE_FORMATS) as image:
            _check_source_pixels(plan, image.height, image.width, number)
            upright = ImageOps.exif_transpose(image)
            rgb = _flatten(upright)
    except PILLOW_ERRORS as error:
        raise MediaFault("MEDIA_UNREADABLE", f"is no image that can be read: {error}", file=number) from error
    height, width = size or _target(plan, rgb.height, rgb.width, kept_frames, number)
    _check_room(height * width * 3, room_bytes)
    return _resized(rgb, height, width)


def _flatten(image: Image.Image) -> Image.Image:
    """RGB, transparency on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _resized(rgb: Image.Image, height: int, width: int) -> np.ndarray:
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(rgb)


def _target(plan: dict[str, Any], height: int, width: int, kept_frames: int, file: int = 0) -> tuple[int, int]:
    """(height, width) to resize to: the limits' size, then what the checkpoint's processor would make of that."""
    try:
        factor, low, high = plan["factor"], plan["min_pixels"], plan["max_pixels"]
        if plan["kind"] == "video":
            height, width = video_frame_size(
                height,
                width,
                kept_frames,
                factor=factor,
                min_pixels=low,
                max_pixels=high,
                total_pixels=plan["total_pixels"],
            )
        else:
            height, width = smart_resize(height, width, factor, low, high)
        if plan["processor_pixels"]:
            height, width = smart_resize(height, width, factor, *plan["processor_pixels"])
    except ValueError as error:
        raise MediaFault("MEDIA_UNREADABLE", str(error), file=file) from error
    return height, width


def _check_source_pixels(plan: dict[str, Any], height: int, width: int, file: int = 0) -> None:
    if height * width > plan["max_source_pixels"]:
        raise MediaFault(
            "MEDIA_TOO_LARGE",
            f"has frames of {width}x{height} = {width * height} pixels, the limit is {plan['max_source_pixels']} "
            "(max_source_pixels)",
            file=file,
            pixels=width * height,
            limit=plan["max_source_pixels"],
        )


def _check_room(needed_bytes: int, room_bytes: int) -> None:
    if needed_bytes > room_bytes:
        raise MediaFault(
            "MEDIA_TOO_LARGE",
            f"needs {needed_bytes} bytes decoded, {room_bytes} are left for it (max_slab_bytes)",
            needed_bytes=needed_bytes,
            room_bytes=room_bytes,
        )


class _Video:
    """One video file: an index pass over its packets, then the kept frames are decoded."""

    def __init__(self, plan: dict[str, Any], fd: int) -> None:
        self.plan, self.fd = plan, fd

    def clip(self, room_bytes: int) -> Clip:
        try:
            self._read_index()
            indices = frame_indices(self.total, self.rate, **{key: self.plan[key] for key in ("fps", "min_frames", "max_frames")})
            picked = (self._pick_seeking(indices, room_bytes) if self.times else None) or self._pick(indices, room_bytes)
        except av.error.EOFError as error:
            raise MediaFault("MEDIA_NO_FRAMES", "ends before its first frame") from error
        except av.error.FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            raise MediaFault("MEDIA_UNREADABLE", f"is no video that can be read: {error.strerror}") from error
        except (ValueError, ArithmeticError, TypeError, LookupError) as error:
            # What PyAV and its callers make of time bases of 0, sizes below 0, pixel formats without a name.
            raise MediaFault("MEDIA_UNREADABLE", f"is no video that can be read: {error}") from error
        times = [self._seconds(index) for index in indices]
        fps = len(indices) / self.total * self.rate
        return Clip([picked[index] for index in indices], fps, times, self.total, self.total / self.rate)

    def _open(self) -> tuple[Any, VideoStream]:
        os.lseek(self.fd, 0, os.SEEK_SET)
        options = {"fd": str(self.fd), "protocol_whitelist": "fd", "format_whitelist": VIDEO_FORMATS}
        container = av.open("fd:", options=options, **_LENIENT)
        stream = container.streams.best("video")
        # A stream of a codec that nobody knows has no context.
        if stream is None or stream.codec_context is None:
            container.close()
            raise MediaFault("MEDIA_NO_FRAMES", "has no video stream that can be decoded")
        stream.codec_context.thread_count = 1
        _check_source_pixels(self.plan, stream.codec_context.height, stream.codec_context.width)
        return container, stream

    def _read_index(self) -> None:
        """Sets total (frames), rate (a second), times (every frame's pts, ascending, or empty), keys, unit_s."""
        container, stream = self._open()
        with container:
            self._check_whole(container, stream)
            times, keys, limit, end_s = [], [], self.plan["max_source_frames"], 0.0
            for packet in container.demux():
                if not packet.size or packet.is_discard:
                    continue
                if packet.pts is not None:
                    end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                if packet.stream is not stream:
                    continue
                if packet.is_corrupt:
                    raise MediaFault("MEDIA_TRUNCATED", f"is cut off or damaged at frame {len(times)}")
                times.append(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
                if len(times) > limit:
                    what = f"has more than {limit} frames (max_source_frames)"
                    raise MediaFault("MEDIA_TOO_LARGE", what, limit=limit)
            self.total = len(times)
            if not self.total:
                raise MediaFault("MEDIA_NO_FRAMES", "has a video stream without a frame")
            self._check_duration(container, end_s)
            known = None not in times and len(set(times)) == len(times)
            self.times, self.keys = (sorted(times), sorted(keys)) if known else ([], [])
            self.unit_s = float(stream.time_base)
            self.rate = self._rate(stream)

    def _check_whole(self, container: Any, stream: VideoStream) -> None:
        """An mp4's index says where every frame lies. (PyAV before 17 does not show it.)"""
        end = max((entry.pos + entry.size for entry in getattr(stream, "index_entries", ())), default=0)
        size = os.fstat(self.fd).st_size
        if end > size:
            what = f"is cut off: its index reaches to byte {end}, the file has {size}"
            raise MediaFault("MEDIA_TRUNCATED", what, indexed_bytes=end, size_bytes=size)

    def _check_duration(self, container: Any, end_s: float) -> None:
        """Matroska has no such index, and its demuxer takes a cut for the end; but its header holds the duration."""
        if not container.format.name.startswith("matroska") or not container.duration:
            return
        announced_s = (container.duration + max(container.start_time or 0, 0)) / av.time_base
        if end_s < announced_s - max(1.0, 0.05 * announced_s):
            what = f"is cut off: its header announces {announced_s:.1f} s, {end_s:.1f} s are there"
            raise MediaFault("MEDIA_TRUNCATED", what, announced_s=announced_s, read_s=end_s)

    def _rate(self, stream: VideoStream) -> float:
        rate = stream.average_rate or stream.guessed_rate
        if rate:
            return float(rate)
        if len(self.times) > 1:
            return (len(self.times) - 1) / ((self.times[-1] - self.times[0]) * self.unit_s)
        raise MediaFault("MEDIA_UNREADABLE", f"has {self.total} frame(s) and no frame rate")

    def _seconds(self, index: int) -> float:
        return (self.times[index] - self.times[0]) * self.unit_s if self.times else index / self.rate

    def _pick(self, indices: list[int], room_bytes: int) -> dict[int, np.ndarray]:
        """{index: frame}, counting frames from the start."""
        container, stream = self._open()
        wanted, picked, decoded = set(indices), {}, 0
        with container:
            for frame in container.decode(stream):
                if decoded in wanted:
                    picked[decoded] = self._keep(frame, decoded, indices, picked, room_bytes)
                decoded += 1
                if len(picked) == len(wanted):
                    return picked
        raise MediaFault(
            "MEDIA_TRUNCATED" if decoded else "MEDIA_NO_FRAMES",
            f"is cut off or damaged: it holds {self.total} frames, {decoded} of them could be decoded",
            frames=self.total,
            decoded=decoded,
        )

    def _pick_seeking(self, indices: list[int], room_bytes: int) -> dict[int, np.ndarray] | None:
        """The same by time stamp, seeking over long gaps; None when a frame does not come out as indexed."""
        container, stream = self._open()
        picked, position = {}, -1
        with container:
            frames = container.decode(stream)
            for index in indices:
                if index in picked:
                    continue
                target = self.times[index]
                key = max((key for key in self.keys if key <= target), default=self.times[0])
                if position >= 0 and self._index_of(key) - position > SEEK_WORTH_FRAMES:
                    container.seek(key, stream=stream)
                    frames = container.decode(stream)
                frame = next((frame for frame in frames if frame.pts is None or frame.pts >= target), None)
                if frame is None or frame.pts != target:
                    return None
                picked[index] = self._keep(frame, index, indices, picked, room_bytes)
                position = index
        return picked

    def _index_of(self, time: int) -> int:
        return np.searchsorted(self.times, time).item()

    def _keep(
        self, frame: VideoFrame, index: int, indices: list[int], picked: dict[int, np.ndarray], room_bytes: int
    ) -> np.ndarray:
        if frame.is_corrupt:
            raise MediaFault("MEDIA_TRUNCATED", f"is cut off or damaged at frame {index}", frame=index)
        _check_source_pixels(self.plan, frame.height, frame.width)
        rgb = frame.to_ndarray(format="rgb24")
        if frame.rotation % 90 == 0 and frame.rotation:
            rgb = np.rot90(rgb, frame.rotation // 90)
        if picked:
            height, width = next(iter(picked.values())).shape[:2]
        else:
            height, width = _target(self.plan, *rgb.shape[:2], len(indices))
            _check_room(len(indices) * height * width * 3, room_bytes)
        if rgb.shape[:2] == (height, width):
            return np.ascontiguousarray(rgb)
        return _resized(Image.fromarray(np.ascontiguousarray(rgb)), height, width)
