"""`python -m rollplex.broker`: serves custody of this node's slabs."""

from __future__ import annotations

import sys

from rollplex.core.entry import arguments, run_service


def main() -> None:
    parsed = arguments("broker", "Custody of this node's slabs.").parse_args()
    from rollplex.broker.config import load

    config = load(parsed.config, parsed.overrides)
    from rollplex.broker.server import main as serve
    from rollplex.rpc.server import configure_logging, run

    configure_logging("broker")
    run(serve(config))


if __name__ == "__main__":
    sys.exit(run_service(main))
