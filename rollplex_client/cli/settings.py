"""The effective configuration: file, then --set, then options; every section is read strictly before anything starts."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.config import MeshSection, RunConfig
from rollplex.core.errors import BadInput
from rollplex.core.strict import apply_overrides, parse, read_toml, to_plain
from rollplex.core.tcp_security import TcpSecurity
from rollplex.data.checkpoint_files import check_checkpoint
from rollplex_client.cli.sections import SECTIONS, section_class

DEFAULT_FILE = Path("rollplex.toml")
DEFAULT_RUNTIME_DIR = Path(".rollplex")


@dataclass(frozen=True, slots=True)
class Settings:
    """`given` is what the user wrote; `sections` are the parsed dataclasses of it. [model] is absent until given."""

    given: dict[str, Any]
    sections: dict[str, Any]

    @property
    def mesh(self) -> MeshSection:
        return self.sections["mesh"]

    @property
    def run(self) -> RunConfig:
        return self.sections["run"]

    @property
    def coordinator_address(self) -> str:
        return self.mesh.address("coordinator")

    def plain(self) -> dict[str, Any]:
        """Every section with every value, as it is written for the services."""
        return {name: to_plain(section) for name, section in self.sections.items()}

    def require_model(self) -> None:
        """Raises BadInput when no checkpoint is given, or one that is incomplete or of another architecture."""
        if "model" not in self.sections:
            raise BadInput("no model: give --model DIR, or checkpoint in the [model] section", reason="MODEL_MISSING")
        check_checkpoint(self.sections["model"].checkpoint)


def load(arguments: argparse.Namespace, extra: Mapping[str, Any] | None = None) -> Settings:
    """Reads the file and applies --set, then `extra` (section -> key -> value) from options. Raises BadInput."""
    path = arguments.config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    data = apply_overrides(read_toml(path) if path else {}, arguments.overrides)
    given = {section: dict(values) for section, values in (extra or {}).items()}
    if arguments.runtime_dir is not None:
        given.setdefault("mesh", {})["runtime_dir"] = str(arguments.runtime_dir)
    return parse_settings(merge(data, given))


def parse_settings(data: dict[str, Any]) -> Settings:
    """Raises BadInput for an unknown section or key, naming the nearest, and for wrong values."""
    for name, value in data.items():
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.4)
            hint = f"; did you mean [{near[0]}]?" if near else f"; known sections: {', '.join(SECTIONS)}"
            raise BadInput(f"unknown config section [{name}]{hint}", reason="UNKNOWN_CONFIG_SECTION", section=name,
                           nearest=near[0] if near else "")
        if not isinstance(value, dict):
            raise BadInput(f"config key {name!r} is a section: write [{name}] and its keys below", reason="BAD_CONFIG")
    mesh = {"runtime_dir": str(DEFAULT_RUNTIME_DIR), **data.get("mesh", {})}
    if isinstance(mesh["runtime_dir"], str):
        mesh["runtime_dir"] = str(Path(mesh["runtime_dir"]).absolute())
    data = {**data, "mesh": mesh}
    TcpSecurity.use(mesh)
    sections = {name: parse(section_class(name), data.get(name, {}), name)
                for name in SECTIONS if name != "model" or "model" in data}
    return Settings(data, sections)


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def merged(settings: Settings, extra: Mapping[str, Any]) -> Settings:
    """The settings with more values, parsed again."""
    return parse_settings(merge(settings.given, extra))
