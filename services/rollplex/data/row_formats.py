"""One builder a dataset format: a raw row (a dict as it was in the file) to a `PromptRow`."""

from __future__ import annotations

import datetime
import decimal
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.data.media_columns import MediaSource
from rollplex.data.rows import MEDIA_KINDS, MediaRef, PromptRow

QUESTION_TEMPLATE = (
    "{Question}\nWork the question out step by step before you answer: look closely at what is shown, weigh the "
    "possibilities, and check your reasoning. Write this reasoning between <think> and </think>, and after it the "
    "final answer between <answer> and </answer>."
)
TYPE_TEMPLATES = {
    "multiple choice": " Inside the <answer> </answer> tags put only the letter of the chosen option, for example B.",
    "numerical": " Inside the <answer> </answer> tags put only the number, for example 42 or 3.14.",
    "OCR": " Read the text that is shown and put exactly that text inside the <answer> </answer> tags.",
    "free-form": " Put your answer as text inside the <answer> </answer> tags.",
    "regression": " Inside the <answer> </answer> tags put only the number, for example 42 or 3.14.",
}

MEDIA_COLUMNS = {"images": "image", "image": "image", "videos": "video", "video": "video"}
PROMPT_COLUMNS = ("prompt", "messages", "problem")
TRUTH_COLUMNS = ("solution", "answer", "ground_truth")

_PLACEHOLDER = re.compile(r"(<image>|<video>)")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What `read_dataset` was told, for every row alike."""

    source: MediaSource
    question_template: str
    type_templates: Mapping[str, str]
    problem_types: Sequence[str] | None
    require_ground_truth: bool


def detect(raw: dict[str, Any]) -> str:
    """ "video-r1", "verl" or "conversational", by the columns. Raises BadInput listing them when none fits."""
    if {"problem", "path", "data_type"} <= raw.keys():
        return "video-r1"
    if "prompt" in raw and isinstance(raw.get("reward_model"), dict):
        return "verl"
    if any(column in raw for column in PROMPT_COLUMNS):
        return "conversational"
    raise BadInput(
        f"no known format has the columns {', '.join(map(repr, raw)) or '(none)'}; Video-R1 has 'problem', 'path', "
        "'data_type'; verl has 'prompt', 'reward_model'; conversational rows have 'prompt', 'messages' or 'problem'",
        reason="UNKNOWN_FORMAT",
    )


def video_r1(raw: dict[str, Any], index: int, options: RowOptions) -> PromptRow:
    """Video-R1: the options follow the problem under "Options:", then the template and the type's own instruction."""
    kind = _column(raw, "data_type", str)
    if kind not in MEDIA_KINDS:
        raise BadInput(f"column 'data_type' is {kind!r}, neither 'image' nor 'video'", reason="BAD_COLUMN", column="data_type")
    problem_type = _column(raw, "problem_type", str)
    _check_problem_type(problem_type, options)
    question = _column(raw, "problem", str)
    if not question.strip():
        raise BadInput("column 'problem' is empty", reason="EMPTY_PROMPT", column="problem")
    if problem_type == "multiple choice":
        choices = _column(raw, "options", list)
        if not choices:
            raise BadInput("column 'options' is empty in a multiple choice row", reason="BAD_COLUMN", column="options")
        question += "Options:\n" + "".join(f"{choice}\n" for choice in choices)
    text = options.question_template.replace("{Question}", question) + _type_template(problem_type, options)
    content = [{"type": kind}, {"type": "text", "text": text}]
    return PromptRow(
        index=index,
        messages=[{"role": "user", "content": content}],
        media=(options.source.ref(kind, raw["path"], "path"),),
        ground_truth=_truth(raw, ("solution",), options),
        problem_type=problem_type,
        data_source=_text(raw.get("data_source")),
        columns=_other_columns(raw, ()),
    )


def verl(raw: dict[str, Any], index: int, options: RowOptions) -> PromptRow:
    """verl: <image> and <video> inside the content strings, media in `images` and `videos`."""
    extra = raw.get("extra_info") or {}
    reward_model = raw.get("reward_model") or {}
    if not isinstance(reward_model, dict):
        raise BadInput(f"column 'reward_model' is {reward_model!r:.80}, not an object", reason="BAD_COLUMN",
                       column="reward_model")
    problem_type = raw.get("problem_type") or (extra.get("problem_type") if isinstance(extra, dict) else None)
    _check_problem_type(problem_type, options)
    messages, media = _messages_and_media(raw, "prompt", options, insert=False)
    return PromptRow(
        index=index,
        messages=messages,
        media=media,
        ground_truth=_truth(reward_model, ("ground_truth",), options, "reward_model."),
        problem_type=problem_type,
        data_source=_text(raw.get("data_source")),
        columns=_other_columns(raw, ("prompt", *MEDIA_COLUMNS)),
    )


def conversational(raw: dict[str, Any], index: int, options: RowOptions) -> PromptRow:
    """TRL and its relatives: typed or string content; without any placeholder, media lead the first user message."""
    _check_problem_type(raw.get("problem_type"), options)
    column = next(column for column in PROMPT_COLUMNS if column in raw)
    messages, media = _messages_and_media(raw, column, options, insert=True)
    return PromptRow(
        index=index,
        messages=messages,
        media=media,
        ground_truth=_truth(raw, TRUTH_COLUMNS, options),
        problem_type=raw.get("problem_type"),
        data_source=_text(raw.get("data_source")),
        columns=_other_columns(raw, ("prompt", "messages", *MEDIA_COLUMNS)),
    )


def _messages_and_media(
    raw: dict[str, Any], column: str, options: RowOptions, *, insert: bool
) -> tuple[list[dict[str, Any]], tuple[MediaRef, ...]]:
    if raw.get("audios"):
        raise BadInput("column 'audios' is set; audio is not supported", reason="BAD_COLUMN", column="audios")
    queues: dict[str, list[MediaRef]] = {kind: [] for kind in MEDIA_KINDS}
    for name, kind in MEDIA_COLUMNS.items():
        queues[kind] += options.source.refs(kind, raw.get(name), name)
    prompt = raw[column]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise BadInput(
            f"column {column!r} is a {type(prompt).__name__}, not a text or messages",
            reason="BAD_COLUMN",
            column=column,
        )
    messages, inline = [], []
    for position, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadInput(
                f"column {column!r}: message {position} has no role: {message!r:.80}",
                reason="BAD_COLUMN",
                column=column,
            )
        parts = list(_parts(message.get("content"), f"{column}[{position}].content", options.source))
        messages.append({"role": message["role"], "content": [part for part, _ in parts]})
        inline += [(part["type"], own) for part, own in parts if part["type"] in MEDIA_KINDS]
    if insert and not inline:
        inline = _insert(messages, queues)
    media = [own or queues[kind].pop(0) for kind, own in inline if own or queues[kind]]
    # Entries without a placeholder stay, so that check_row counts them.
    return messages, (*media, *queues["image"], *queues["video"])


def _insert(messages: list[dict[str, Any]], queues: dict[str, list[MediaRef]]) -> list[tuple[str, None]]:
    kinds = [kind for kind in MEDIA_KINDS for _ in queues[kind]]
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is None:
        return []
    user["content"][:0] = [{"type": kind} for kind in kinds]
    return [(kind, None) for kind in kinds]


def _parts(content: Any, column: str, source: MediaSource):
    """(part, the MediaRef written into it or None), in order."""
    if not isinstance(content, str | list | None):
        raise BadInput(f"column {column!r} is {content!r:.80}, neither a text nor a list of parts", reason="BAD_PART",
                       column=column)
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            pieces = _PLACEHOLDER.split(part["text"]) if isinstance(content, str) else [part["text"]]
            for piece in pieces:
                if piece in ("<image>", "<video>") and isinstance(content, str):
                    yield {"type": piece[1:-1]}, None
                elif piece:
                    yield {"type": "text", "text": piece}, None
        elif kind in MEDIA_KINDS:
            written = any(value is not None for key, value in part.items() if key not in ("type", "text"))
            yield (
                {"type": kind},
                source.ref(kind, {key: v for key, v in part.items() if key != "text"}, column) if written else None,
            )
        else:
            raise BadInput(
                f"column {column!r} has a part that is no text, image or video: {part!r:.80}",
                reason="BAD_PART",
                column=column,
            )


def _check_problem_type(problem_type: Any, options: RowOptions) -> None:
    known = options.problem_types
    if problem_type is not None and not isinstance(problem_type, str):
        raise BadInput(f"column 'problem_type' is {problem_type!r:.80}, not a text", reason="BAD_COLUMN", column="problem_type")
    if problem_type is None or not known or problem_type in known:
        return
    near = difflib.get_close_matches(str(problem_type).lower(), [name.lower() for name in known], n=1, cutoff=0)[0]
    near = next(name for name in known if name.lower() == near)
    raise BadInput(
        f"column 'problem_type' is {problem_type!r}; nearest known: {near!r} (known: {', '.join(known)})",
        reason="UNKNOWN_PROBLEM_TYPE",
        column="problem_type",
        value=problem_type,
        nearest=near,
    )


def _type_template(problem_type: str, options: RowOptions) -> str:
    if problem_type not in options.type_templates:
        known = ", ".join(options.type_templates)
        raise BadInput(f"no type template for problem type {problem_type!r} (there are: {known})", reason="UNKNOWN_PROBLEM_TYPE")
    return options.type_templates[problem_type]


def _truth(raw: dict[str, Any], columns: Sequence[str], options: RowOptions, prefix: str = "") -> str | None:
    value = next((raw[column] for column in columns if raw.get(column) is not None), None)
    if value is None or (isinstance(value, str) and not value.strip()):
        if not options.require_ground_truth:
            return None
        names = " or ".join(f"{prefix}{column}" for column in columns)
        raise BadInput(f"the ground truth is missing: column {names} is absent or empty", reason="NO_GROUND_TRUTH", column=names)
    return _text(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(_json(value, "ground truth"), ensure_ascii=False)


def _column(raw: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(raw.get(name), kind):
        raise BadInput(f"column {name!r} is {raw.get(name)!r:.80}, not a {kind.__name__}", reason="BAD_COLUMN", column=name)
    return raw[name]


def _other_columns(raw: dict[str, Any], used: Sequence[str]) -> dict[str, Any]:
    return {name: _json(value, name) for name, value in raw.items() if name not in used}


def _json(value: Any, column: str) -> Any:
    """The value as JSON holds it; parquet has some types that JSON has not."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _json(entry, column) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(entry, column) for entry in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise BadInput(
        f"column {column!r} holds a {type(value).__name__}, which rewards cannot be given",
        reason="BAD_COLUMN",
        column=column,
    )
