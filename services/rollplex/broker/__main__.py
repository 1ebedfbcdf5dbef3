"""`python -m rollplex.broker`: serves custody of this node's slabs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollplex.broker", description="Custody of this node's slabs.")
    parser.add_argument("--config", type=Path, help="TOML file with the sections [mesh] and [broker]")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="overrides one value of the file; may be repeated")
    arguments = parser.parse_args()
    from rollplex.broker.config import load
    from rollplex.broker.server import main as serve
    from rollplex.core.errors import RollplexError
    from rollplex.rpc.server import configure_logging, run

    configure_logging("broker")
    try:
        run(serve(load(arguments.config, arguments.overrides)))
    except RollplexError as error:
        sys.exit(f"broker: {error}")


if __name__ == "__main__":
    main()
