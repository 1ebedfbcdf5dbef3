"""Score items as the arguments that TRL and verl functions expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.v1.reward_service_pb2 import ScoreItem, ScoreRequest

TRUTH_COLUMNS = ("solution", "answer")
"""What Video-R1 and EasyR1 call the ground truth; filled with it where the row has no such column."""

OWN_FIELDS = ("ground_truth", "problem_type", "data_source")


def trl_arguments(request: ScoreRequest, log_extra: Callable[[str, Sequence[Any]], None],
                  log_metric: Callable[[str, float], None]) -> dict[str, Any]:
    """Every argument TRL would pass; columns are lists, None where a row lacks one that another row has."""
    rows = [columns_of(item, index) for index, item in enumerate(request.items)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    messages = [_json(item.messages_json, list, "messages_json", index) for index, item in enumerate(request.items)]
    return columns | {
        "prompts": messages,
        "completions": [[{"role": "assistant", "content": item.response_text}] for item in request.items],
        "completion_ids": [list(item.response_token_ids) for item in request.items],
        "trainer_state": SimpleNamespace(global_step=request.iteration),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def verl_arguments(item: ScoreItem, index: int) -> dict[str, Any]:
    """`extra_info` is the row's own, with its other columns beside it."""
    columns = columns_of(item, index)
    extra_info = columns.pop("extra_info", None)
    if not isinstance(extra_info, dict):
        extra_info = {} if extra_info is None else {"extra_info": extra_info}
    own = {name: columns.get(name) for name in ("data_source", "ground_truth")}
    rest = {name: value for name, value in columns.items() if name not in own}
    return {"solution_str": item.response_text, **own, "extra_info": rest | extra_info}


def columns_of(item: ScoreItem, index: int) -> dict[str, Any]:
    """All columns of the row. Raises BadInput, naming the item, when they are no JSON object."""
    columns = dict(_json(item.columns_json or "{}", dict, "columns_json", index))
    for name in OWN_FIELDS:
        if item.HasField(name):
            columns[name] = getattr(item, name)
    if item.HasField("ground_truth"):
        for name in TRUTH_COLUMNS:
            columns.setdefault(name, item.ground_truth)
    return columns


def _json(text: str, kind: type, field: str, index: int) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"item {index}: {field} is no JSON: {error}", reason="BAD_ITEM", item=index) from error
    if not isinstance(value, kind):
        expected = "list" if kind is list else "object"
        raise BadInput(f"item {index}: {field} must be a JSON {expected}, not {text[:80]!r}", reason="BAD_ITEM",
                       item=index)
    return value
