"""The reference of every section and key, read from the dataclasses and the docstrings under their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from rollplex_client.cli.sections import SECTIONS, section_class

_INTRO = """# Configuration

One TOML file holds everything; `rollplex` reads all of it strictly before anything starts, and each service then reads
its own sections. An unknown section or key is an error that names the nearest one. Values are changed for one command
with `--set section.key=value`. `rollplex config` prints the effective configuration, `rollplex config --check` only
checks it, and `rollplex config --defaults` prints a file to start from. Where a file gives no `mesh.runtime_dir`,
`rollplex` takes `./.rollplex`; [model] may be left to `--model`.

This page is written by `rollplex config --reference` from the dataclasses; a test compares the two.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    path: str
    kind: str
    default: str
    """As in TOML; "required" or "absent" otherwise."""
    text: str


def section_keys(cls: type, prefix: str = "") -> list[Key]:
    """The keys of a dataclass, those of nested ones with dotted paths."""
    hints, texts = typing.get_type_hints(cls), field_docstrings(cls)
    keys = []
    for item in dataclasses.fields(cls):
        hint, path = hints[item.name], f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hint):
            keys += section_keys(hint, f"{path}.")
        else:
            keys.append(Key(path, _kind(hint), _default(item), texts.get(item.name, "")))
    return keys


def field_docstrings(cls: type) -> dict[str, str]:
    """The string literal under each field, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    texts = {}
    for field, after in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _kind(next(choice for choice in typing.get_args(hint) if choice is not type(None)))
    if typing.get_origin(hint) is tuple:
        return f"list of {_kind(typing.get_args(hint)[0])}"
    return {str: "string", Path: "path", bool: "boolean", int: "integer", float: "number"}[hint]


def _default(item: dataclasses.Field) -> str:
    if item.default is dataclasses.MISSING:
        return "required" if item.default_factory is dataclasses.MISSING else _toml(item.default_factory())
    return _toml(item.default)


def _toml(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def reference_markdown() -> str:
    """The text of docs/config.md."""
    parts = [_INTRO]
    for name in SECTIONS:
        cls = section_class(name)
        parts.append(f"## [{name}]\n\n{_summary(cls)}\n" + _table(section_keys(cls)))
    return "\n".join(parts)


def _summary(cls: type) -> str:
    """The class's docstring without the section's own name; a generated one says nothing."""
    text = " ".join((cls.__doc__ or "").split())
    if text.startswith(f"{cls.__name__}("):
        return ""
    text = re.sub(r"^\[\w+\][.:]? ?", "", text)
    return text[:1].upper() + text[1:] + "\n" if text else ""


def _table(keys: list[Key]) -> str:
    rows = "".join(f"| `{key.path}` | {key.kind} | {_code(key.default)} | {key.text.replace('|', chr(92) + '|')} |\n"
                   for key in keys)
    return "| key | type | default | meaning |\n| --- | --- | --- | --- |\n" + rows


def _code(default: str) -> str:
    return default if default in ("required", "absent") else f"`{default}`"


def default_toml() -> str:
    """A commented file with every key at its default; keys without one are commented out."""
    lines = []
    for name in SECTIONS:
        sections: dict[str, list[Key]] = {}
        for key in section_keys(section_class(name)):
            table, _, leaf = f"{name}.{key.path}".rpartition(".")
            sections.setdefault(table, []).append(dataclasses.replace(key, path=leaf))
        for table, keys in sections.items():
            lines.append(f"# [{table}]" if name == "model" else f"[{table}]")
            for key in keys:
                lines += [f"# {text}" for text in textwrap.wrap(key.text, 116)]
                # [model] cannot be given without the checkpoint, so all of it stays commented out.
                commented = key.default in ("required", "absent") or name == "model"
                lines.append(f"# {key.path} = {key.default}" if commented else f"{key.path} = {key.default}")
            lines.append("")
    return "\n".join(lines)

