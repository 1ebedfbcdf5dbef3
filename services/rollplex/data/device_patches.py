"""Patches of decoded frames computed on a device, bit for bit the processor's.

The decoder fits media to sizes that the processor leaves alone (limits.py), so what is left of the processor's work is
(x - mean) / std and the order of patches: one rounding an operation, the same everywhere. Whether that is so is tried out once
with the checkpoint's own processor; where it is not, or a medium would be resized, the processor itself computes.

Legend: T frames, H, W pixels, C channels, t, h, w patches, u temporal patch, m merge size, p patch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollplex.data.media import MediaItem

if TYPE_CHECKING:
    from rollplex.data.processor import PixelArrays, PromptProcessor

Upload = Callable[[np.ndarray], torch.Tensor]
"""A host array as a tensor on the device, which no longer needs the array."""


class DevicePatches:
    """A processor's pixels on a device. Tried out at construction: `exact` says by kind what it may be used for."""

    def __init__(self, processor: PromptProcessor, upload: Upload) -> None:
        self._processor, self._upload = processor, upload
        self.exact = {kind: self._agrees(kind) for kind in ("image", "video")}

    def pixels(self, items: Sequence[MediaItem], frames: Sequence[np.ndarray]) -> PixelArrays:
        """As PromptProcessor.pixels, with pixel values on the device."""
        if not all(self.exact[item.kind] and self._fits(item) for item in items):
            computed = self._processor.pixels(items, frames)
            names = ("pixel_values_images", "pixel_values_videos")
            return replace(computed, **{name: self._upload(host) for name in names
                                        if (host := getattr(computed, name)) is not None})
        return self._compute(items, frames)

    def _compute(self, items: Sequence[MediaItem], frames: Sequence[np.ndarray]) -> PixelArrays:
        from rollplex.data.processor import PixelArrays

        self._processor.check_frames(items, frames)
        found: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
        grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
        for item, array in zip(items, frames):
            found[item.kind].append(patches(self._upload(array), self._processor.part(item.kind)))
            grids[item.kind].append(self._processor.grid(item))
        values = {kind: torch.cat(parts) if parts else None for kind, parts in found.items()}
        arrays = {kind: np.asarray(rows, dtype=np.int64) if rows else None for kind, rows in grids.items()}
        return PixelArrays(values["image"], arrays["image"], values["video"], arrays["video"])

    def _fits(self, item: MediaItem) -> bool:
        """Whether the processor resizes nothing."""
        size = self._processor.part(item.kind).patch_size
        _, rows, columns = self._processor.grid(item)
        return item.shape[1:3] == (rows * size, columns * size)

    def _agrees(self, kind: str) -> bool:
        """Whether every byte value of every channel comes out as from the processor."""
        part = self._processor.part(kind)
        if not (part.do_rescale and part.do_normalize):
            return False
        item = _medium(kind, 4 * self._processor.factor, 6 * self._processor.factor)
        _, rows, columns = self._processor.grid(item)
        item = _medium(kind, rows * part.patch_size, columns * part.patch_size)
        if not self._fits(item):
            return False
        frames = [(np.arange(item.size_bytes) * 37 % 256).astype(np.uint8).reshape(item.shape)]
        expected, found = self._processor.pixels([item], frames), self._compute([item], frames)
        name = f"pixel_values_{kind}s"
        return torch.equal(torch.from_numpy(getattr(expected, name)), getattr(found, name).cpu())


def patches(frames_THWC: torch.Tensor, part: Any) -> torch.Tensor:
    """uint8 frames -> float32 [t*h*w, C*u*p*p], by the numbers of an image or video processor; an image is repeated in time."""
    device, scale = frames_THWC.device, 1.0 / part.rescale_factor
    # Made on the host: a list handed to a device would stop for it.
    mean_C, std_C = (torch.tensor(values) * scale for values in (part.image_mean, part.image_std))
    if device.type == "cuda":
        mean_C, std_C = (values.pin_memory().to(device, non_blocking=True) for values in (mean_C, std_C))
    x_THWC = frames_THWC.to(torch.float32).sub_(mean_C).div_(std_C)
    if missing := -len(x_THWC) % part.temporal_patch_size:
        x_THWC = torch.cat((x_THWC, x_THWC[-1:].expand(missing, -1, -1, -1)))
    steps, size, merge = part.temporal_patch_size, part.patch_size, part.merge_size
    frames, height, width, channels = x_THWC.shape
    rows, columns = height // (merge * size), width // (merge * size)
    #                 0 t              1 u    2 h   3 m    4 p   5 w      6 m    7 p   8 C
    cut = x_THWC.view(frames // steps, steps, rows, merge, size, columns, merge, size, channels)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, channels * steps * size * size)


def _medium(kind: str, height: int, width: int) -> MediaItem:
    frames = 3 if kind == "video" else 1
    return MediaItem(kind=kind, offset_bytes=0, shape=(frames, height, width, 3), fps=2.0 if kind == "video" else None,
                     timestamps_s=(), source_frames=frames, source_duration_s=None, sha256="")
