"""Reads a data file into `PromptRow`s. Formats are told apart row by row; a bad row is named with column and value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollplex.core.errors import BadInput, DeadlineExceeded, Forbidden
from rollplex.data import row_formats
from rollplex.data.media_columns import MediaSource
from rollplex.data.row_formats import QUESTION_TEMPLATE, TYPE_TEMPLATES, RowOptions
from rollplex.data.rows import PROBLEM_TYPES, PromptRow, check_row

Format = Literal["auto", "video-r1", "verl", "conversational"]

_BUILDERS = {
    "video-r1": row_formats.video_r1,
    "verl": row_formats.verl,
    "conversational": row_formats.conversational,
}
_NEEDS = {"video-r1": ("problem", "path", "data_type"), "verl": ("prompt",), "conversational": ()}

PARQUET_BATCH_ROWS = 256


def read_dataset(
    path: Path,
    *,
    media_root: Path | None = None,
    format: Format = "auto",
    spool_dir: Path | None = None,
    question_template: str = QUESTION_TEMPLATE,
    type_templates: Mapping[str, str] = TYPE_TEMPLATES,
    problem_types: Sequence[str] | None = PROBLEM_TYPES,
    require_ground_truth: bool = True,
    refused: list[tuple[int, str]] | None = None,
) -> list[PromptRow]:
    """All rows of a .json (list or lines), .jsonl or .parquet file, checked by `check_row`.

    media_root: put before relative media paths; default: the file's folder. spool_dir: where embedded bytes are
    written, by hash. question_template has "{Question}" in it; type_templates has one entry a problem type (both for
    Video-R1 rows only).
    problem_types: what `problem_type` may be; None accepts anything. refused: when given, bad rows are appended as
    (index, reason) instead of raised.

    Raises BadInput for an unreadable or empty file, an unknown format, and the first bad row.
    """
    if format != "auto" and format not in _BUILDERS:
        raise BadInput(f"format {format!r} is none of auto, {', '.join(_BUILDERS)}", reason="UNKNOWN_FORMAT")
    if "{Question}" not in question_template:
        raise BadInput("question_template has no {Question} in it", reason="BAD_TEMPLATE")
    source = MediaSource(Path(media_root or path.parent).absolute(), spool_dir and Path(spool_dir).absolute())
    options = RowOptions(source, question_template, type_templates, problem_types, require_ground_truth)
    rows, count = [], 0
    for index, raw in enumerate(_raw_rows(path)):
        count += 1
        try:
            rows.append(build_row(raw, index, format, options))
        except BadInput as error:
            located = _located(error, path, index)
            if refused is None:
                raise located from error
            refused.append((index, str(located)))
    if not count:
        raise BadInput(f"{path} has no rows", reason="EMPTY_DATASET", path=path)
    return rows


def split_valid(rows: Sequence[PromptRow], check: Callable[[PromptRow], None]) -> tuple[list[PromptRow], list[tuple[int, str]]]:
    """(rows that `check` accepts, [(index, reason)] of those it refuses: BadInput, Forbidden, DeadlineExceeded)."""
    valid: list[PromptRow] = []
    refused: list[tuple[int, str]] = []
    for row in rows:
        try:
            check(row)
        except (BadInput, Forbidden, DeadlineExceeded) as error:
            refused.append((row.index, str(error)))
        else:
            valid.append(row)
    return valid, refused


def build_row(raw: Any, index: int, format: Format, options: RowOptions) -> PromptRow:
    if not isinstance(raw, dict):
        raise BadInput(f"it is a {type(raw).__name__}, not an object with columns", reason="BAD_ROW")
    name = row_formats.detect(raw) if format == "auto" else format
    missing = [column for column in _NEEDS[name] if column not in raw]
    if name == "conversational" and not any(column in raw for column in row_formats.PROMPT_COLUMNS):
        missing = [" or ".join(row_formats.PROMPT_COLUMNS)]
    if missing:
        raise BadInput(f"a {name} row needs the column {', '.join(missing)}; there are {', '.join(raw)}", reason="BAD_ROW")
    try:
        row = _BUILDERS[name](raw, index, options)
    except RecursionError:
        raise BadInput("it is nested too deeply", reason="BAD_ROW") from None
    check_row(row)
    return row


def _located(error: BadInput, path: Path, index: int) -> BadInput:
    what = str(error).removeprefix(f"row {index}: ")
    metadata = {key: value for key, value in error.metadata.items() if key not in ("row", "file")}
    return BadInput(f"{path}, row {index}: {what}", reason=error.reason, row=index, file=path, **metadata)


def _raw_rows(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise BadInput(f"data file {path} does not exist or is not a file", reason="NO_DATASET", path=path)
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".json", ".jsonl"):
        yield from _json_rows(path)
    else:
        raise BadInput(f"data file {path} is none of .json, .jsonl, .parquet", reason="UNKNOWN_FORMAT", path=path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"data file {path} is no parquet that can be read: {error}", reason="BAD_DATASET", path=path) from error


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(64).lstrip("\ufeff \t\r\n")
            file.seek(0)
            if path.suffix == ".json" and start.startswith("["):
                yield from json.load(file)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_line(path, number, line)
    except UnicodeDecodeError as error:
        raise BadInput(f"data file {path} is not UTF-8: {error}", reason="BAD_DATASET", path=path) from error
    except json.JSONDecodeError as error:
        raise BadInput(
            f"data file {path}, line {error.lineno}, column {error.colno}: no JSON: {error.msg}",
            reason="BAD_DATASET",
            path=path,
        ) from error
    except (ValueError, RecursionError) as error:  # numbers without an end, lists in lists
        raise BadInput(f"data file {path}: no JSON that can be read: {error}", reason="BAD_DATASET", path=path) from error


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"data file {path}, line {number}, column {error.colno}: no JSON: {error.msg}",
            reason="BAD_DATASET",
            path=path,
        ) from error
