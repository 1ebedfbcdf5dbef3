"""`python -m rollplex.trainer`: one trainer rank of a mesh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollplex.core.errors import RollplexError
from rollplex.trainer.config import load_config


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollplex.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file with [model], [mesh] and [trainer]")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides",
                        help="overrides a key, as in trainer.threads=2; may be repeated")
    parser.add_argument("--rank", type=int, default=0, help="tensor-parallel rank of this process, from 0")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        from rollplex.trainer.server import serve_forever

        serve_forever(config, arguments.rank)
    except RollplexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
