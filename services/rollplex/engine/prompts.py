"""A prepared group as the model takes it: frames read where they lie, pixels computed, the prompt's hash checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from rollplex.core import work
from rollplex.core.errors import BadInput, DataLoss
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import contiguous_strides
from rollplex.data.device_patches import DevicePatches
from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.memory.transfer import to_device
from rollplex.model import ModelConfig, PromptInputs


class PromptReader:
    """Every engine's way to a prompt; media slabs are host memory. Owner thread only."""

    def __init__(self, session: BrokerSession, processor: PromptProcessor, model_config: ModelConfig,
                 device: torch.device | str = "cpu") -> None:
        """`device`: where the model is. A GPU gets raw frames and computes pixels itself where that gives the processor's very
        values; nothing that is read here waits for it."""
        self._session = session
        self._processor, self._config = processor, model_config
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._pixels = DevicePatches(processor, self._upload).pixels if on_gpu else processor.pixels

    def read(self, group: work.PreparedGroup) -> PromptInputs:
        """The inputs of one prompt; the media slab is leased and mapped only meanwhile.

        Raises DataLoss (PROMPT_MISMATCH, both hashes) when this engine understands another prompt than the coordinator,
        BadInput for media or tokens that do not fit together; both name the group.
        """
        with naming_group(group):
            inputs = self._inputs(group)
        check_prompt_hash(group, inputs.hash())
        return inputs.to(self.device)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    def _inputs(self, group: work.PreparedGroup) -> PromptInputs:
        tokens = np.frombuffer(group.token_ids, dtype=np.int64).copy()
        if not group.media:
            return PromptInputs.from_arrays(self._config, token_ids=tokens)
        items = [data_media_item(item) for item in group.media]
        with self.frames(group.media) as frames:
            pixels = self._pixels(items, frames)
            frames.clear()
        return PromptInputs.from_arrays(
            self._config,
            token_ids=tokens,
            pixel_values_images=pixels.pixel_values_images,
            image_grid_thw=pixels.image_grid_thw,
            pixel_values_videos=pixels.pixel_values_videos,
            video_grid_thw=pixels.video_grid_thw,
            second_per_grid_ts=self._processor.second_per_grid_ts(items),
        )

    @contextmanager
    def frames(self, media: Sequence[work.MediaItem]) -> Iterator[list[np.ndarray]]:
        """uint8 [T, H, W, 3] views of the prompt's slab, one an item; the caller drops them before the context ends.

        Raises BadInput unless the media lie in one slab.
        """
        slabs = {item.frames.slab for item in media}
        if len(slabs) != 1:
            raise BadInput(f"the prompt's media lie in {len(slabs)} slabs: {sorted(slabs)}", reason="BAD_MEDIA")
        with self._session.lease(slabs.pop(), LeaseMode.READ) as lease:
            mapped = MappedSlab(driver_of(lease.slab.device), lease.slab.size_bytes)
            try:
                mapped.bind(lease)
                yield [mapped.tensor(item.frames).numpy() for item in media]
            finally:
                mapped.close()


@contextmanager
def naming_group(group: work.PreparedGroup) -> Iterator[None]:
    """A ValueError inside becomes a BadInput that names the group."""
    try:
        yield
    except ValueError as error:
        domain = error if isinstance(error, BadInput) else BadInput(str(error), reason="BAD_MEDIA")
        metadata = {**domain.metadata, "group_index": group.group_index}
        raise BadInput(f"group {group.group_index}: {error}", reason=domain.reason, **metadata) from error


def check_prompt_hash(group: work.PreparedGroup, found: str) -> None:
    """Raises DataLoss (PROMPT_MISMATCH) when this engine understands another prompt than the coordinator."""
    if found != group.prompt_hash:
        raise DataLoss(
            f"group {group.group_index}: token ids, grids and timing hash to {found} here and to "
            f"{group.prompt_hash} at the coordinator; both must use the same checkpoint and processor",
            reason="PROMPT_MISMATCH",
            group_index=group.group_index,
            found=found,
            expected=group.prompt_hash,
        )


def data_media_item(item: work.MediaItem) -> MediaItem:
    """The engine's message as the processor takes it; what only the decoder knows (source, timestamps) is left empty.

    Raises BadInput for frames that are not contiguous uint8 [T, H, W, 3], or a video without a frame rate.
    """
    frames = item.frames
    if len(frames.shape) != 4 or frames.shape[-1] != 3 or frames.dtype != "uint8" or 0 in frames.shape:
        raise BadInput(f"frames are {frames.dtype} {list(frames.shape)}, not uint8 [T, H, W, 3]", reason="BAD_MEDIA")
    if frames.strides != contiguous_strides(frames.shape):
        raise BadInput(f"frames have strides {list(frames.strides)}; they must be contiguous", reason="BAD_MEDIA")
    video = item.kind == "video"
    if item.kind not in ("image", "video") or (video and not item.fps > 0):
        raise BadInput(f"a medium of kind {item.kind!r} at {item.fps} frames a second", reason="BAD_MEDIA")
    return MediaItem(
        kind=item.kind,
        offset_bytes=frames.offset_bytes,
        shape=frames.shape,
        fps=item.fps if video else None,
        timestamps_s=(),
        source_frames=frames.shape[0],
        source_duration_s=None,
        sha256=item.sha256,
    )
