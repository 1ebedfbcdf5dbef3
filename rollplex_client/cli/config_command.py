"""config: the effective configuration, a check of it, or the reference of all keys."""

from __future__ import annotations

import argparse

from rollplex.core.strict import to_toml
from rollplex_client.cli.config_reference import default_toml, reference_markdown
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import load


def show(arguments: argparse.Namespace, output: Output) -> None:
    """Plain text goes to stdout unstyled, so that it can be piped into a file."""
    if arguments.reference or arguments.defaults:
        text = reference_markdown() if arguments.reference else default_toml()
        if output.json:
            output.result({"text": text})
        else:
            print(text, end="")
        return
    settings = load(arguments)
    if arguments.check:
        output.result({"ok": True, "sections": sorted(settings.given)},
                      f"the configuration is valid; sections given: {', '.join(sorted(settings.given))}")
    elif output.json:
        output.result(settings.plain())
    else:
        print(to_toml(settings.plain()), end="")
