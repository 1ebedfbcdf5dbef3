"""How every service reads its part of the one config file, before it imports anything heavy."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput, RollplexError
from rollplex.core.strict import apply_overrides, parse, read_toml
from rollplex.core.tcp_security import TcpSecurity

SECTIONS = ("mesh", "model", "run", "coordinator", "broker", "rollout", "reference", "trainer", "reward", "data",
            "train")
"""Every section of the file; a service reads its own and leaves the others to their owners."""


def load_sections(path: Path | None, overrides: list[str], wanted: Mapping[str, type]) -> dict[str, Any]:
    """The `wanted` sections as their dataclasses; a section that is not in the file takes its defaults.

    Raises BadInput for an unknown section or key, naming the nearest.
    """
    data = apply_overrides(read_toml(path) if path else {}, overrides)
    for name, value in data.items():
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; sections: {', '.join(SECTIONS)}"
            raise BadInput(f"unknown config section {name!r}{hint}", reason="UNKNOWN_CONFIG_KEY", key=name,
                           nearest=near[0] if near else "")
        if not isinstance(value, dict):
            raise BadInput(f"config key {name!r} must be a section", reason="BAD_CONFIG", key=name)
    TcpSecurity.use(data.get("mesh", {}))
    return {name: parse(kind, data.get(name, {}), name) for name, kind in wanted.items()}


def arguments(service: str, description: str) -> argparse.ArgumentParser:
    """`--config FILE` and `--set a.b=c`, the same for every service."""
    parser = argparse.ArgumentParser(prog=f"python -m rollplex.{service}", description=description)
    parser.add_argument("--config", type=Path, help="the mesh's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides",
                        help="override a key, as in mesh.runtime_dir=/tmp/mesh; may be repeated")
    return parser


def run_service(main: Callable[[], None]) -> int:
    """Exit status of a service: a user's mistake is one line on stderr and status 2."""
    try:
        main()
    except RollplexError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 2
    return 0
