"""`python -m rollplex.trainer`: one trainer rank of a mesh."""

from __future__ import annotations

import sys

from rollplex.core.entry import arguments, run_service
from rollplex.core.imports import uncollected
from rollplex.rpc.mps_link import hold_daemon
from rollplex.trainer.config import load_config


def main() -> None:
    parser = arguments("trainer", "One trainer rank of a mesh.")
    parser.add_argument("--rank", type=int, default=0, help="tensor-parallel rank of this process, from 0")
    given = parser.parse_args()
    config = load_config(given.config, given.overrides)
    # Before the imports below: some ask CUDA for its devices, and a process decides then whether it is a client of MPS.
    hold_daemon(config.mesh)
    with uncollected():
        from rollplex.trainer.server import serve_forever

    serve_forever(config, given.rank)


if __name__ == "__main__":
    sys.exit(run_service(main))
