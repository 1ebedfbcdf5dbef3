"""`python -m rollplex.rollout`: one rollout replica of a mesh."""

from __future__ import annotations

import sys

from rollplex.core.entry import arguments, run_service
from rollplex.core.imports import uncollected
from rollplex.core.topology import Topology
from rollplex.core.visible_gpus import see_only
from rollplex.rollout.config import load_config
from rollplex.rpc.mps_link import hold_daemon


def main() -> None:
    parser = arguments("rollout", "One rollout replica of a mesh.")
    parser.add_argument("--replica", type=int, default=0, help="number of the data-parallel replica, from 0")
    given = parser.parse_args()
    config = load_config(given.config, given.overrides)
    # Before anything is imported that may ask CUDA.
    see_only_its_gpus(config.mesh.topology, given.replica)
    # Before the imports below: some ask CUDA for its devices, and a process decides then whether it is a client of MPS.
    hold_daemon(config.mesh)
    with uncollected():
        from rollplex.rollout.server import serve_forever

    serve_forever(config, given.replica)


def see_only_its_gpus(topology: Topology, replica: int) -> None:
    """The replica's own first, by rank: vLLM takes them in this order. Then those that it copies from, if it has its own."""
    if topology.device_kind == "cuda":
        sources = topology.source(replica) if topology.own_replicas else ()
        see_only((*topology.replica_devices(replica), *sources))


if __name__ == "__main__":
    sys.exit(run_service(main))
