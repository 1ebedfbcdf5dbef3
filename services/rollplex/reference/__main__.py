"""`python -m rollplex.reference`: the reference of a mesh."""

from __future__ import annotations

import sys

from rollplex.core.entry import arguments, run_service
from rollplex.reference.config import load_config


def main() -> None:
    parser = arguments("reference", "The reference of a mesh.")
    given = parser.parse_args()
    config = load_config(given.config, given.overrides)
    from rollplex.reference.server import serve_forever

    serve_forever(config)


if __name__ == "__main__":
    sys.exit(run_service(main))
