"""What a dataset row is once it has been read: a prompt, the media of its placeholders, and what rewards need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from rollplex.core.errors import BadInput

PROBLEM_TYPES = ("multiple choice", "numerical", "OCR", "free-form", "regression")
"""The types that Video-R1's reward rules know."""

ROLES = ("system", "user", "assistant", "tool")

MEDIA_KINDS = ("image", "video")


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One image or video, by path, with what the row itself asks of its decoding; None leaves it to `MediaLimits`."""

    kind: Literal["image", "video"]
    path: str = ""
    """One file; empty when `frames` is used."""
    frames: tuple[str, ...] = ()
    """A video given as image files, in order."""
    fps: float | None = None
    """Frames a second to keep. For `frames`: the rate at which they were taken."""
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    """Height * width of one frame, at least."""
    max_pixels: int | None = None
    """Height * width of one frame, at most."""
    total_pixels: int | None = None
    """Pixels of a whole video, at most (qwen-vl-utils counts two frames as one)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files behind it, in order."""
        return self.frames or (self.path,)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt. A placeholder part ({"type": "image"} or {"type": "video"}) stands for the next entry of `media`."""

    index: int
    """Row number in its file, from 0."""
    messages: list[dict[str, Any]]
    """{"role": str, "content": [{"type": "text", "text": str} | {"type": "image"} | {"type": "video"}]}, in order."""
    media: tuple[MediaRef, ...] = ()
    """In placeholder order, images and videos mixed as they appear."""
    ground_truth: str | None = None
    problem_type: str | None = None
    data_source: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the file, as JSON values."""


def placeholder_kinds(messages: list[dict[str, Any]]) -> list[str]:
    """Kind of every placeholder, in prompt order: ["video", "image", ...]."""
    return [part["type"] for message in messages for part in message["content"] if part["type"] in MEDIA_KINDS]


def check_row(row: PromptRow) -> None:
    """Raise BadInput when the row cannot be a prompt; `metadata["row"]` is its index.

    Checked: roles and parts, a user message, some text or media, the last turn not the assistant's, and one media entry
    of the right kind for every placeholder.
    """
    _check_messages(row)
    wanted = placeholder_kinds(row.messages)
    given = [media.kind for media in row.media]
    for kind in MEDIA_KINDS:
        placeholders, entries = Counter(wanted)[kind], Counter(given)[kind]
        if placeholders != entries:
            raise _refusal(
                row,
                f"the prompt has {placeholders} {kind} placeholder(s) but the row has {entries} {kind}(s)",
                "PLACEHOLDER_COUNT",
                kind=kind,
                placeholders=placeholders,
                media=entries,
            )
    if wanted != given:
        raise _refusal(row, f"placeholders are {wanted} in order, media are {given}", "PLACEHOLDER_ORDER")
    for position, media in enumerate(row.media):
        if not all(media.paths):
            raise _refusal(row, f"media {position} ({media.kind}) has an empty path", "MEDIA_MISSING", media=position)


def _check_messages(row: PromptRow) -> None:
    if not isinstance(row.messages, list):
        raise _refusal(row, "the messages are no list", "BAD_PART")
    if not row.messages:
        raise _refusal(row, "the prompt has no messages", "EMPTY_PROMPT")
    for position, message in enumerate(row.messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            raise _refusal(row, f"message {position} is no object with a list of parts as `content`", "BAD_PART")
        if message.get("role") not in ROLES:
            allowed = ", ".join(ROLES)
            raise _refusal(row, f"message {position} has role {message.get('role')!r:.80}, not one of {allowed}", "BAD_ROLE")
        for part in message["content"]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", *MEDIA_KINDS):
                raise _refusal(row, f"message {position} has a part of type {kind!r:.80}", "BAD_PART")
            if kind == "text" and not isinstance(part.get("text"), str):
                raise _refusal(row, f"message {position} has a text part without a `text`", "BAD_PART")
    users = [message for message in row.messages if message["role"] == "user"]
    if not users:
        roles = [message["role"] for message in row.messages]
        raise _refusal(row, f"the prompt has no user message, its roles are {roles}", "NO_USER_MESSAGE")
    if row.messages[-1]["role"] == "assistant":
        raise _refusal(row, "the prompt ends with an assistant message; there is nothing left to answer", "ENDS_WITH_ANSWER")
    if not any(part["type"] != "text" or part["text"].strip() for message in users for part in message["content"]):
        raise _refusal(row, "the prompt is empty: no user message has text or media", "EMPTY_PROMPT")


def _refusal(row: PromptRow, what: str, reason: str, **metadata: object) -> BadInput:
    return BadInput(f"row {row.index}: {what}", reason=reason, row=row.index, **metadata)
