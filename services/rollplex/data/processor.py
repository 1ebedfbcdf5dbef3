"""The checkpoint's own tokenizer, chat template and processors: token ids from shapes, pixel patches from frames.

P prompt tokens; T, H, W frames, height, width; n images or videos.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from rollplex.core.errors import BadInput
from rollplex.core.prompt_hash import prompt_hash
from rollplex.data.checkpoint_files import check_processor_files
from rollplex.data.limits import MediaLimits
from rollplex.data.media import MediaItem
from rollplex.data.rows import placeholder_kinds
from rollplex.data.sizes import smart_resize
from rollplex.torchvision_ops import ensure_torchvision

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2_5_VLProcessor

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclasses.dataclass(frozen=True)
class TokenizedPrompt:
    token_ids: np.ndarray
    """int64 [P], placeholders expanded."""
    image_grid_thw: np.ndarray | None
    """int64 [n, 3], patches along time, height and width, in prompt order; None without images."""
    video_grid_thw: np.ndarray | None
    second_per_grid_ts: list[float] | None
    """Seconds that one step of a video grid's time axis covers, one a video; None without videos."""
    prompt_text: str
    """The rendered chat template, one placeholder token a medium."""

    def prompt_hash(self) -> str:
        return prompt_hash(self.token_ids, self.image_grid_thw, self.video_grid_thw, self.second_per_grid_ts)


@dataclasses.dataclass(frozen=True)
class PixelArrays:
    pixel_values_images: np.ndarray | torch.Tensor | None
    """float32 [sum of t*h*w, 3 * temporal_patch * patch * patch]; None without images. A tensor where a device computed it."""
    image_grid_thw: np.ndarray | None
    pixel_values_videos: np.ndarray | torch.Tensor | None
    video_grid_thw: np.ndarray | None


def import_transformers() -> None:
    """What `PromptProcessor.load` imports otherwise, 1.5 s of CPU: for a program that has all its imports in one place."""
    ensure_torchvision()
    from transformers import Qwen2_5_VLProcessor  # noqa: F401


class PromptProcessor:
    """Loaded once a process; its methods have no side effects and may be called from any thread, one at a time."""

    def __init__(self, processor: Qwen2_5_VLProcessor, *, max_prompt_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._images, self._videos = processor.image_processor, processor.video_processor
        self.max_prompt_tokens = max_prompt_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        vocabulary = self._tokenizer.get_vocab()
        self._vision_tokens = [token for token in VISION_TOKENS if token in vocabulary]
        self.forbidden_token_ids = tuple(vocabulary[token] for token in self._vision_tokens)
        self.image_token_id, self.video_token_id = processor.image_token_id, processor.video_token_id
        self.vision_start_token_id = vocabulary["<|vision_start|>"]
        self.pad_token_id = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else eos_token_ids[0]
        self.factor = self._images.patch_size * self._images.merge_size

    @classmethod
    def load(cls, checkpoint: Path, *, max_prompt_tokens: int) -> PromptProcessor:
        """Raises BadInput for a directory that lacks files, is of another architecture, or has no chat template."""
        check_processor_files(checkpoint)
        ensure_torchvision()
        from transformers import Qwen2_5_VLProcessor

        try:
            processor = Qwen2_5_VLProcessor.from_pretrained(checkpoint, local_files_only=True)
            missing = [token for token in VISION_TOKENS if token not in processor.tokenizer.get_vocab()]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(
                f"checkpoint {checkpoint}: its processor does not load: {error}",
                reason="BAD_CHECKPOINT",
                path=checkpoint,
            ) from error
        if missing := [token for token in missing if token != "<|vision_pad|>"]:
            raise BadInput(
                f"checkpoint {checkpoint}: its tokenizer lacks {', '.join(missing)}",
                reason="BAD_CHECKPOINT",
                path=checkpoint,
            )
        if not (processor.chat_template or processor.tokenizer.chat_template):
            raise BadInput(
                f"checkpoint {checkpoint} has no chat template (chat_template.jinja, chat_template.json, or "
                "`chat_template` in tokenizer_config.json)",
                reason="NO_CHAT_TEMPLATE",
                path=checkpoint,
            )
        eos = _eos_token_ids(checkpoint, processor.tokenizer.eos_token_id)
        if not eos:
            raise BadInput(f"checkpoint {checkpoint} names no end-of-sequence token", reason="BAD_CHECKPOINT")
        return cls(processor, max_prompt_tokens=max_prompt_tokens, eos_token_ids=eos)

    def fit_limits(self, limits: MediaLimits) -> MediaLimits:
        """The same limits with this checkpoint's own sizes after them, so its processor resizes nothing."""
        return dataclasses.replace(
            limits,
            processor_image_pixels=_pixel_range(self._images),
            processor_video_pixels=_pixel_range(self._videos),
        )

    def tokenize(self, messages: list[dict[str, Any]], items: Sequence[MediaItem] = ()) -> TokenizedPrompt:
        """Render, tokenize, and expand every placeholder by the grid of its item; no pixel is read.

        Raises BadInput for placeholders that do not match `items`, vision tokens spelled out in text, an empty prompt,
        and a prompt over `max_prompt_tokens`, which is never shortened.
        """
        self._check_placeholders(messages, items)
        text = self._render(messages)
        grids = [self.grid(item) for item in items]
        token_ids = self._expand(np.asarray(self._tokenizer(text)["input_ids"], dtype=np.int64), items, grids)
        if len(token_ids) > self.max_prompt_tokens:
            raise BadInput(
                f"the prompt has {len(token_ids)} tokens, the limit is {self.max_prompt_tokens} (max_prompt_tokens); "
                f"{sum(self._token_count(grid) for grid in grids)} of them are media",
                reason="PROMPT_TOO_LONG",
                tokens=len(token_ids),
                limit=self.max_prompt_tokens,
            )
        seconds = self.second_per_grid_ts(items)
        return TokenizedPrompt(token_ids, _stack(items, grids, "image"), _stack(items, grids, "video"), seconds, text)

    def second_per_grid_ts(self, items: Sequence[MediaItem]) -> list[float] | None:
        """Seconds that one step of a video grid's time axis covers, one a video; None without videos."""
        return [self._videos.temporal_patch_size / item.fps for item in items if item.kind == "video"] or None

    def pixels(self, items: Sequence[MediaItem], frames: Sequence[np.ndarray]) -> PixelArrays:
        """Patches of the decoded frames. `frames`: uint8 [T, H, W, 3], one an item, in the same order.

        Raises ValueError when frames and items differ in number or shape.
        """
        self.check_frames(items, frames)
        image = video = {}
        # Copied because torch refuses to promise anything about read-only arrays.
        images = [np.array(array[0]) for item, array in zip(items, frames) if item.kind == "image"]
        videos = [np.array(array) for item, array in zip(items, frames) if item.kind == "video"]
        if images:
            image = self._images(images, input_data_format="channels_last", return_tensors="np")
        if videos:
            video = self._videos(
                videos,
                video_metadata=[self.video_metadata(item) for item in items if item.kind == "video"],
                input_data_format="channels_last",
                return_tensors="pt",
                **self.video_options(),
            )
        return PixelArrays(
            _array(image.get("pixel_values"), np.float32),
            _array(image.get("image_grid_thw"), np.int64),
            _array(video.get("pixel_values_videos"), np.float32),
            _array(video.get("video_grid_thw"), np.int64),
        )

    def check_frames(self, items: Sequence[MediaItem], frames: Sequence[np.ndarray]) -> None:
        """Raises ValueError when they differ in number or shape."""
        if [array.shape for array in frames] != [item.shape for item in items]:
            raise ValueError(f"frames of {[array.shape for array in frames]} for items of {[item.shape for item in items]}")

    def part(self, kind: str) -> Any:
        """transformers' processor of images or of videos."""
        return self._videos if kind == "video" else self._images

    def video_options(self) -> dict[str, bool]:
        """What every caller of the video processor must spell out: frames come sampled, and no bound depends on a version."""
        return {"do_sample_frames": False, **self._cap_choice()}

    def video_metadata(self, item: MediaItem) -> dict[str, Any]:
        """Of a video whose frames are those that the decoder chose."""
        frames = item.shape[0]
        return {"total_num_frames": frames, "fps": item.fps, "frames_indices": list(range(frames))}

    def decode_text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a response, special tokens left out."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True)

    def _cap_choice(self) -> dict[str, bool]:
        """The checkpoint's cap_pixels_per_frame, spelled out: what unset means depends on transformers' version."""
        if not hasattr(self._videos, "cap_pixels_per_frame"):
            return {}
        return {"cap_pixels_per_frame": bool(self._videos.cap_pixels_per_frame)}

    def _check_placeholders(self, messages: list[dict[str, Any]], items: Sequence[MediaItem]) -> None:
        wanted, given = placeholder_kinds(messages), [item.kind for item in items]
        if wanted != given:
            raise BadInput(
                f"the prompt's placeholders are {wanted}, its media are {given}",
                reason="PLACEHOLDER_COUNT",
                placeholders=len(wanted),
                media=len(given),
            )
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        for token in self._vision_tokens:
            if any(token in text for text in texts):
                raise BadInput(f"the prompt's text contains the vision token {token}", reason="VISION_TOKEN_IN_TEXT")
        if not items and not any(text.strip() for text in texts):
            raise BadInput("the prompt is empty", reason="EMPTY_PROMPT")

    def _render(self, messages: list[dict[str, Any]]) -> str:
        template = self._processor.chat_template or self._tokenizer.chat_template
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise BadInput(f"the chat template refuses the prompt: {error}", reason="CHAT_TEMPLATE") from error

    def _expand(self, token_ids: np.ndarray, items: Sequence[MediaItem], grids: list[tuple[int, int, int]]) -> np.ndarray:
        repeats = np.ones(len(token_ids), dtype=np.int64)
        for kind, token in (("image", self.image_token_id), ("video", self.video_token_id)):
            counts = [self._token_count(grid) for item, grid in zip(items, grids) if item.kind == kind]
            places = np.flatnonzero(token_ids == token)
            if len(places) != len(counts):
                raise BadInput(
                    f"the chat template made {len(places)} {kind} placeholder(s) of {len(counts)} {kind}(s)",
                    reason="PLACEHOLDER_COUNT",
                    placeholders=len(places),
                    media=len(counts),
                )
            repeats[places] = counts
        return np.repeat(token_ids, repeats)

    def _token_count(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self._images.merge_size**2

    def grid(self, item: MediaItem) -> tuple[int, int, int]:
        """(t, h, w) patches that the processor's own resize and patching will make of the item."""
        frames, height, width, _ = item.shape
        part = self.part(item.kind)
        pixels = _pixel_range(part)
        if pixels is not None:
            if item.kind == "video":
                pixels = self._capped(pixels, frames)
            height, width = smart_resize(height, width, part.patch_size * part.merge_size, *pixels)
        steps = -(-frames // part.temporal_patch_size) if item.kind == "video" else 1
        return steps, height // part.patch_size, width // part.patch_size

    def _capped(self, pixels: tuple[int, int], frames: int) -> tuple[int, int]:
        """Qwen2VLVideoProcessor.resize's bound on a whole video, which a checkpoint may switch on."""
        videos = self._videos
        if not any(self._cap_choice().values()):
            return pixels
        total = int(videos.max_video_tokens * (videos.patch_size * videos.merge_size) ** 2 * 0.9)
        return pixels[0], max(min(pixels[1], total * videos.temporal_patch_size // frames), int(pixels[0] * 1.05))


def _pixel_range(part: Any) -> tuple[int, int] | None:
    """(min, max) pixels of an image or video processor; None when it does not resize."""
    return (part.size["shortest_edge"], part.size["longest_edge"]) if part.do_resize else None


def _stack(items: Sequence[MediaItem], grids: list[tuple[int, int, int]], kind: str) -> np.ndarray | None:
    own = [grid for item, grid in zip(items, grids) if item.kind == kind]
    return np.asarray(own, dtype=np.int64) if own else None


def _array(value: Any, dtype: type) -> np.ndarray | None:
    return None if value is None else np.asarray(value, dtype=dtype)


def _eos_token_ids(checkpoint: Path, tokenizer_eos: int | None) -> list[int]:
    """generation_config.json's, then the tokenizer's."""
    path = checkpoint / "generation_config.json"
    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    eos = [named] if isinstance(named, int) else list(named or ())
    return eos + [tokenizer_eos] if tokenizer_eos is not None and tokenizer_eos not in eos else eos
