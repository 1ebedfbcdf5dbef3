"""A broker and its keeper as real processes, and engines as real processes beside them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from rollplex.memory.client import BrokerSession
from rollplex.rpc.handles import connect

HOLDER = """
    import json, sys
    from pathlib import Path
    from rollplex.core.leases import LeaseMode
    from rollplex.core.placement import Placement
    from rollplex.memory.client import BrokerSession
    from rollplex.memory.drivers import driver_of
    from rollplex.memory.mapping import MappedSlab

    directory, process, role = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    session = BrokerSession.connect(f"unix:{directory}/broker.sock", directory / "handles.sock", process=process, role=role)
    held = {}

    def hold(slab, mode, writable=False, **options):
        lease = session.lease(slab, LeaseMode(mode), **options)
        mapped = MappedSlab(driver_of(lease.slab.device), lease.slab.size_bytes)
        mapped.bind(lease, writable=writable)
        held[slab] = lease, mapped, mapped.tensor(Placement.contiguous(slab, 0, (lease.slab.size_bytes,), "uint8"))

    for line in sys.stdin:
        try:
            answer = eval(line)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
"""


class Holder:
    """An engine's process; `ask` evaluates an expression there."""

    def __init__(self, directory: Path, process: str, role: str) -> None:
        command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(directory), process, role]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, expression: str):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Node:
    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rollplex-broker-"))
        self.options = [f"mesh.runtime_dir={self.directory}", "broker.keeper_timeout_s=5"]
        self.started: list = []
        self.broker: subprocess.Popen | None = None
        self.keeper: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.directory}/broker.sock"

    def _start(self, module: str) -> subprocess.Popen:
        command = [sys.executable, "-m", module]
        for option in self.options:
            command += ["--set", option]
        self.started.append(subprocess.Popen(command))
        return self.started[-1]

    def start_keeper(self) -> None:
        self.keeper = self._start("rollplex.broker.keeper")

    def await_keeper(self) -> None:
        """Until it listens: a test's short `keeper_timeout_s` is not meant for the start of a process."""
        while True:
            with contextlib.suppress(OSError):
                connect(self.directory / "keeper.sock", timeout_s=1.0).close()
                return
            assert self.keeper.poll() is None, "the keeper has exited"
            time.sleep(0.01)

    def start_broker(self) -> None:
        self.broker = self._start("rollplex.broker")

    def session(self, process="trainer-0", role="trainer", timeout_s=15.0) -> BrokerSession:
        self.started.append(BrokerSession.connect(self.address, self.directory / "handles.sock", process=process,
                                                  role=role, timeout_s=timeout_s))
        return self.started[-1]

    def holder(self, process="rollout-0", role="rollout") -> Holder:
        self.started.append(Holder(self.directory, process, role))
        return self.started[-1]

    def stop(self) -> None:
        for item in reversed(self.started):
            if isinstance(item, Holder):
                item.stop()
            elif isinstance(item, BrokerSession):
                item.close()
            else:
                item.kill()
                item.wait()
        shutil.rmtree(self.directory)
