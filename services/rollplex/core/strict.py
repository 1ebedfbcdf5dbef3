"""Strict reading of TOML and JSON into frozen dataclasses: an unknown key names the nearest, a wrong type says so."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollplex.core.errors import BadInput

T = TypeVar("T")

_FLOAT_END = sys.float_info.max


def parse(cls: type[T], data: dict[str, Any], where: str = "") -> T:
    """Builds `cls` from `data`; nested tables become nested dataclasses. Raises BadInput naming the key."""
    if not isinstance(data, dict):
        raise BadInput(f"{where or cls.__name__} must be a table, not {data!r}", reason="BAD_CONFIG", key=where)
    hints = typing.get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(names)}"
            raise BadInput(f"unknown config key {path!r}{hint}", reason="UNKNOWN_CONFIG_KEY", key=path,
                           nearest=near[0] if near else "")
        values[key] = _convert(hints[key], value, path)
    try:
        return cls(**values)
    except TypeError as error:
        missing = [item.name for item in dataclasses.fields(cls)
                   if item.name not in values and item.default is dataclasses.MISSING
                   and item.default_factory is dataclasses.MISSING]
        if missing:
            raise BadInput(f"{where or cls.__name__} lacks {', '.join(missing)}", reason="BAD_CONFIG") from error
        raise
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{where + ': ' if where else ''}{error}", reason="BAD_CONFIG", key=where) from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and type(None) in choices:
            return None
        return _convert(next(choice for choice in choices if choice is not type(None)), value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise BadInput(f"{path} must be a list, not {value!r}", reason="BAD_CONFIG", key=path)
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{path}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, path)
    if hint is Path:
        if not isinstance(value, str | Path) or not str(value):
            raise BadInput(f"{path} must be a path, not {value!r}", reason="BAD_CONFIG", key=path)
        return Path(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        # JSON and TOML can both say more than a float holds, and what no comparison of ours would refuse.
        if not abs(value) <= _FLOAT_END:
            raise BadInput(f"{path} must be a finite number, not {value!r:.40}", reason="BAD_CONFIG", key=path)
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise BadInput(f"{path} must be of type {hint.__name__}, not {value!r}", reason="BAD_CONFIG", key=path)
    return value


def to_plain(config: Any) -> dict[str, Any]:
    """The dataclass as nested dicts of JSON types; keys that are None are left out."""
    plain: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value is None:
            continue
        plain[item.name] = _plain_value(value)
    return plain


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Raises BadInput for a file that is missing or no TOML, with the line."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"config file {path} does not exist", reason="CONFIG_NOT_FOUND", path=path) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"config file {path}: {error}", reason="BAD_CONFIG", path=path) from error


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `a.b=c` set; c is read as TOML, or taken as a string where it is none."""
    result = _copy_tables(data)
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise BadInput(f"--set takes section.key=value, not {override!r}", reason="BAD_OVERRIDE")
        table = result
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadInput(f"--set {override!r}: {part!r} is no section", reason="BAD_OVERRIDE")
        table[parts[-1]] = _toml_value(text.strip())
    return result


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copy_tables(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_tables(value) if isinstance(value, dict) else value for key, value in data.items()}


def to_toml(data: dict[str, Any], where: str = "") -> str:
    """Nested plain dicts as TOML text, scalars before tables."""
    scalars = [f"{key} = {_toml_text(value)}" for key, value in data.items()
               if not isinstance(value, dict) and not _is_table_list(value)]
    parts = ["\n".join(([f"[{where}]"] if where and scalars else []) + scalars)] if scalars else []
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if isinstance(value, dict):
            parts.append(to_toml(value, path))
        elif _is_table_list(value):
            parts += [f"[[{path}]]\n" + to_toml(item) for item in value]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_text(item) for item in value) + "]"
    return repr(value)
