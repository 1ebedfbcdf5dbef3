"""A mesh of real processes for faults from outside: a reward that can be held and killed, clocks that can be moved."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hand_mesh import HandMesh
from rpc_proxy import RpcProxy

from rollplex_client import Client, Prompt
from rollplex_client.results import Iteration, IterationHandle

SUPPORT = Path(__file__).parent
PROMPTS = [Prompt.text(f"Which direction, number {index}?", ground_truth="A", problem_type="multiple choice")
           for index in range(6)]
RUN = {"sampling": {"samples_per_group": 2, "max_response_tokens": 6}, "optimizer": {"learning_rate": 1e-3},
       "loss": {"kl_coef": 0.05}, "phase_timeout_s": 60.0, "deterministic": True}


def until(true: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Polls; the deadline only says that it hangs."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


def iteration_of(client: Client, run: str, number: int) -> Iteration:
    return client.get_iteration(IterationHandle(run, number, False, 0))


class GatedReward:
    """A process of tests/support/gated_reward.py. `start` and `kill` are the pair; `held` stops it from answering."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'ids.sock'}"
        self._gate = folder / "reward.gate"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        function = f"{SUPPORT / 'gated_reward.py'}:token_sum"
        self._process = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward", function, "--address", self.address],
                                         env={**os.environ, "GATE_FILE": str(self._gate)})

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    @property
    def asked(self) -> bool:
        """Whether somebody has waited for it since it was held."""
        return self._gate.with_suffix(".asked").exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._gate.with_suffix(".asked").unlink(missing_ok=True)
        self._gate.touch()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._gate.unlink(missing_ok=True)


class FaultyMesh(HandMesh):
    """With `reward` registered as "ids", beside the mesh's own."""

    def __init__(self, checkpoint: Path, media_root: Path, **options) -> None:
        options.setdefault("coordinator", {"journal_full_wait_s": 1.0})
        super().__init__(checkpoint, media_root, **options)
        self.reward, self.media_root = GatedReward(self.runtime_dir), media_root
        self.clock = self.runtime_dir / "clock"
        """Seconds, as text, by which the wall clock of every process is off."""
        self.proxies: dict[str, RpcProxy] = {}
        self._runs = 0
        self.environment = {"CLOCK_FILE": str(self.clock), "PYTHONPATH": os.pathsep.join(
            filter(None, (str(SUPPORT / "wrong_clock"), os.environ.get("PYTHONPATH", ""))))}

    def up(self, **reward) -> None:
        """Everything, the coordinator's calls through `proxies`, by the name of the service behind."""
        self.reward.start()
        self.proxies = {name: RpcProxy(f"unix:{self.runtime_dir}/{name}.proxy", self.mesh.address(name))
                        for name in self.names if name not in ("keeper", "reward", "coordinator")}
        self.start(*self.names)
        with self.client as client:
            client.register_reward("ids", self.reward.address, **reward)

    def start(self, *names: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        others = [name for name in names if name != "coordinator"]
        super().start(*others, arguments=arguments, environment=environment)
        if "coordinator" in names:
            pairs = ", ".join(f'"{name}={proxy.address}"' for name, proxy in self.proxies.items())
            super().start("coordinator", arguments=(*arguments, "--set", f"mesh.addresses=[{pairs}]"), environment=environment)

    def new_run(self, client: Client, **changes) -> str:
        self._runs += 1
        return client.create_run(f"faulty-{self._runs}", {**RUN, **changes}).name

    def limit_files(self, name: str, size_bytes: int | None) -> None:
        """What a process may let any file grow to; None: as much as it likes. What a full disk does, to one process."""
        unlimited = resource.RLIM_INFINITY
        resource.prlimit(self.pid(name), resource.RLIMIT_FSIZE, (unlimited if size_bytes is None else size_bytes, unlimited))

    def close(self) -> None:
        self.reward.release()
        if "coordinator" in self.processes:
            self.stop("coordinator")
        super().close()
        for proxy in self.proxies.values():
            proxy.close()
        self.reward.kill()
