"""A process that hashes actor slabs by READ leases: `slab_witness.py BROKER HANDLE_SOCKET`, a JSON question a line on stdin, a
hash a line on stdout. It holds nothing between two questions and is no part of the mesh: it reads what any reader would."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from rollplex.core.errors import NotFound
from rollplex.core.ids import actor_slab
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab


def actor_hash(session: BrokerSession, run: str, snapshot: int) -> str:
    prefix = actor_slab(run, "")
    names = [slab.name for slab in session.list_slabs(prefix)]
    if not names:
        raise NotFound(f"no slab {prefix}*", reason="SLAB_NOT_FOUND")
    digest = hashlib.sha256()
    for name in sorted(names):
        with session.lease(name, LeaseMode.READ, snapshot=snapshot) as lease:
            size = lease.slab.size_bytes
            mapped = MappedSlab(driver_of(lease.slab.device), size)
            try:
                mapped.bind(lease)
                digest.update(mapped.tensor(Placement.contiguous(name, 0, (size,), "uint8")).cpu().numpy())
            finally:
                mapped.close()
    return digest.hexdigest()


def main() -> None:
    with BrokerSession.connect(sys.argv[1], Path(sys.argv[2]), process="witness", role="coordinator") as session:
        for line in sys.stdin:
            kind, run, snapshot = json.loads(line)
            assert kind == "actor"
            print(actor_hash(session, run, snapshot), flush=True)


if __name__ == "__main__":
    main()
