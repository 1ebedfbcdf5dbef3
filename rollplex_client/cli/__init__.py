"""The `rollplex` command. Parses first; a command's own modules are imported only when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from rollplex_client.cli.arguments import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    arguments.overrides = [override for place in ("overrides", "middle_overrides", "later_overrides")
                           for override in getattr(arguments, place, [])]
    from rollplex_client.cli.output import Output, report_failures

    output = Output(json=arguments.json, debug=arguments.debug)
    module, _, function = arguments.handler.partition(":")

    def command() -> int | None:
        return getattr(importlib.import_module(f"rollplex_client.cli.{module}"), function)(arguments, output)

    return report_failures(output, command)
