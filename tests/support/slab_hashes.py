"""What a run's slabs hash to where they lie. The actor is read by a process that is no part of the mesh, by READ leases as any
reader's (`slab_hashes.py BROKER HANDLE_SOCKET`: a JSON question a line on stdin, a hash a line on stdout); it holds nothing
between two questions, and is a client of the mesh's MPS daemon where there is one."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.errors import NotFound
from rollplex.core.ids import actor_slab, state_slab
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.core.sharing import PIPE_VARIABLE, without_mps_variables
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab

JOURNALLED = ("iterations", "samples", "updates", "events")


class SlabHashes:
    """`actor`, `state`, `journal` between iterations; `dismiss` ends the reading process until the next question."""

    def __init__(self, mesh: MeshSection, broker_pid: Callable[[], int]) -> None:
        self._mesh, self._broker_pid = mesh, broker_pid
        self._witness: subprocess.Popen[str] | None = None

    def actor(self, run: str, snapshot: int) -> str:
        """Of the actor's bytes on every device."""
        if self._witness is None:
            variables = without_mps_variables(dict(os.environ)) | {PIPE_VARIABLE: str(self._mesh.mps_pipe_dir)}
            self._witness = subprocess.Popen(
                [sys.executable, __file__, self._mesh.address("broker"), str(self._mesh.handle_socket)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
        self._witness.stdin.write(json.dumps([run, snapshot]) + "\n")
        self._witness.stdin.flush()
        answer = self._witness.stdout.readline().strip()
        assert answer, f"the reading process ended with status {self._witness.wait(30)}"
        return answer

    def state(self, run: str) -> str:
        """Of rank 0's master weights and moments, in host memory: the trainer has them leased, so by the broker's descriptor."""
        wanted = f"/memfd:rollplex:{state_slab(run, 0, 'optimizer')} (deleted)"
        for entry in Path(f"/proc/{self._broker_pid()}/fd").iterdir():
            try:
                if str(entry.readlink()) == wanted:
                    with entry.open("rb") as file:
                        return hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                continue
        raise AssertionError(f"the broker holds no {wanted}")

    def journal(self, run: str) -> str:
        """Of all that the journal has of a run."""
        digest = hashlib.sha256()
        with closing(sqlite3.connect(f"file:{self._mesh.runtime_dir / 'journal.sqlite'}?mode=ro", uri=True)) as database:
            for table in JOURNALLED:
                rows = sorted(map(repr, database.execute(f"SELECT * FROM {table} WHERE run = ?", (run,))))
                digest.update("\n".join([table, *rows]).encode())
        return digest.hexdigest()

    def dismiss(self) -> None:
        """Before a fault that takes every client of the daemon along."""
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.communicate(timeout=60)


def actor_hash(session: BrokerSession, run: str, snapshot: int) -> str:
    prefix = actor_slab(run, "")
    names = sorted(slab.name for slab in session.list_slabs(prefix))
    if not names:
        raise NotFound(f"no slab {prefix}*", reason="SLAB_NOT_FOUND")
    digest = hashlib.sha256()
    for name in names:
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
            print(actor_hash(session, *json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
