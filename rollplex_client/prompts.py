"""Prompts as a user writes them, and their conversion to `PromptGroup`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollplex.core.errors import BadInput
from rollplex.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from rollplex.data.rows import PromptRow


@dataclass(frozen=True, slots=True)
class Media:
    """One image or video, read by the coordinator. None leaves a limit to the coordinator's configuration."""

    kind: Literal["image", "video"]
    path: str | Path = ""
    frame_paths: tuple[str | Path, ...] = ()
    """A video given as image files, in order; instead of `path`."""
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("image", "video"):
            raise BadInput(f"media kind {self.kind!r} must be 'image' or 'video'", reason="BAD_MEDIA_KIND")
        if bool(self.path) == bool(self.frame_paths):
            raise BadInput(f"{self.kind} needs either path or frame_paths, not both and not neither",
                           reason="MEDIA_MISSING")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt group: its messages, the media behind their placeholders, and what rewards need."""

    messages: Sequence[dict[str, Any]]
    """{"role": str, "content": str or [{"type": "text", "text": str} | {"type": "image"} | {"type": "video"}]}."""
    media: tuple[Media, ...] = ()
    """In placeholder order."""
    ground_truth: str | None = None
    problem_type: str | None = None
    data_source: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to rewards; JSON values."""

    @classmethod
    def text(cls, text: str, *media: Media, **keys: Any) -> Prompt:
        """A single user turn: the media first, then the text. `keys` are this class's other fields."""
        content = [{"type": item.kind} for item in media] + [{"type": "text", "text": text}]
        return cls([{"role": "user", "content": content}], media, **keys)


def prompt_from_row(row: PromptRow) -> Prompt:
    """A row that `rollplex.data.datasets.read_dataset` read."""
    media = tuple(Media(item.kind, item.path, item.frames, item.fps, item.min_frames, item.max_frames, item.min_pixels,
                        item.max_pixels, item.total_pixels) for item in row.media)
    return Prompt(row.messages, media, row.ground_truth, row.problem_type, row.data_source, row.columns)


def to_group(prompt: Prompt) -> pb.PromptGroup:
    """The message. Raises BadInput for columns that are no JSON."""
    try:
        columns = json.dumps(prompt.columns)
    except (TypeError, ValueError) as error:
        raise BadInput(f"columns of a prompt must be JSON values: {error}", reason="BAD_COLUMNS") from error
    messages = [{**message, "content": _parts(message.get("content"))} for message in prompt.messages]
    return pb.PromptGroup(messages_json=json.dumps(messages), media=[_source(item) for item in prompt.media],
                          ground_truth=prompt.ground_truth, problem_type=prompt.problem_type,
                          data_source=prompt.data_source, columns_json=columns)


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _source(media: Media) -> pb.MediaSource:
    return pb.MediaSource(
        kind=media.kind, path=str(Path(media.path).absolute()) if media.path else "",
        frame_paths=[str(Path(path).absolute()) for path in media.frame_paths], fps=media.fps,
        min_frames=media.min_frames, max_frames=media.max_frames, min_pixels=media.min_pixels, max_pixels=media.max_pixels,
        total_pixels=media.total_pixels)
