"""docs/cli.md and docs/metrics.md against what the code knows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from rollplex_client.cli.arguments import build_parser

ROOT = Path(__file__).parents[3]


def commands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{prefix}{name}", command
                yield from commands(command, f"{prefix}{name} ")


def test_every_command_and_option_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    for name, command in commands(build_parser()):
        assert f"rollplex {name}" in text, name
        for action in command._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    assert option in text, f"{name} {option}"


def test_every_metric_the_coordinator_names_is_documented():
    text = (ROOT / "docs" / "metrics.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "services/rollplex/coordinator").glob("*.py"))
    names = set(re.findall(r'metrics\["([a-z_/]+)"\]|"((?:perf|timing_s|rollplex|reward|training)/[a-z_/]+)"', source))
    for pair in names:
        name = pair[0] or pair[1]
        assert f"`{name}`" in text, name
