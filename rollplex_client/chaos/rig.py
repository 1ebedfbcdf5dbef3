"""A small mesh of its own, deterministic to the last bit, whose crash points can be armed: started, iterated, looked into.

Every run has one configuration and one list of prompts, so that iteration i of any run ends with the same snapshot: what an
unfaulted run came to is what every other one has to come to.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollplex.core.checkpoints import read_manifest
from rollplex.core.crash_points import CHUNKS, ENVIRONMENT, Order, arm, disarm
from rollplex.core.errors import DataLoss, DeadlineExceeded, InternalError, NotFound, RollplexError, Unavailable
from rollplex.core.ids import actor_slab, new_id
from rollplex.core.leases import LeaseMode
from rollplex.memory.client import BrokerSession
from rollplex_client.chaos import leaks
from rollplex_client.chaos.cells import SERVICES
from rollplex_client.cli.mesh import HealthProbe, bring_up, last_lines, log_path, stop_timeout_s
from rollplex_client.cli.settings import Settings, parse_settings
from rollplex_client.cli.supervision import Supervisor
from rollplex_client.prompts import Media, Prompt
from rollplex_client.results import Iteration, IterationHandle
from rollplex_client.sync import Client

T = TypeVar("T")

REWARD = "video_r1"
REWARD_MODULE = "rollplex_client.chaos.reward"
REWARD_RETRIES = 8
"""Enough to outlast a restart of the reward: a sample without a score would change what is learned."""
PARAMETERS = 650_000
"""Of rollplex.demo.tiny's model, about."""
STALL_TIMEOUT_S = 1.0
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 90.0
"""For services to be back, and for counts to be what they were."""
GIVE_UP_S = 120.0
ITERATION_TIMEOUT_S = 180.0
POLL_S = 0.05
PHASE_TIMEOUT_S = 60.0

RUN_CONFIG: Mapping[str, Any] = {
    "schedule": "overlap", "deterministic": True, "seed": 1, "checkpoint_every": 1, "checkpoint_keep": 1,
    "phase_timeout_s": PHASE_TIMEOUT_S,
    "sampling": {"samples_per_group": 2, "max_response_tokens": 6}, "loss": {"kl_coef": 0.05},
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2, "total_steps": 1000,
                  "updates_per_iteration": 2, "chunk_elements": -(-PARAMETERS // CHUNKS)},
}


@dataclass(frozen=True, slots=True)
class Ended:
    """What an iteration came to."""

    weights: str
    """sha256 of the actor's bytes."""
    checkpoint: Mapping[str, str]
    """sha256 by file of its durable checkpoint, optimizer state included; empty when none was written."""


class Rig:
    """`start` and `close` are the pair."""

    def __init__(self, folder: Path) -> None:
        """`folder`: short, for sockets lie in it; ours alone."""
        self.folder, self.armed = folder, folder / "armed"
        self.armed.mkdir(mode=0o700)
        self.run = ""
        """The open run; empty before the first."""
        self.iterations = 0
        """Of it."""
        self._runs = 0
        self._supervisor: Supervisor | None = None
        self._session: BrokerSession | None = None
        self.settings = self._settings()

    def _settings(self) -> Settings:
        return parse_settings({
            "mesh": {"runtime_dir": str(self.folder / "rt"), "drain_timeout_s": 2.0, "stall_timeout_s": STALL_TIMEOUT_S},
            "model": {"checkpoint": str(self.folder / "checkpoint"), "max_prompt_tokens": 512},
            "coordinator": {"media_roots": [str(self.folder / "media")], "builtin_reward": REWARD}})

    def build(self) -> None:
        """Checkpoint and media. Raises InternalError with the last words of who makes them."""
        done = subprocess.run([sys.executable, "-m", "rollplex.demo.tiny", "--out", str(self.folder)], capture_output=True,
                              text=True, check=False)
        if done.returncode:
            raise InternalError(f"rollplex.demo.tiny ended with status {done.returncode}: {done.stderr[-400:]}",
                                reason="CHAOS_BUILD_FAILED")

    def start(self) -> None:
        before = os.environ.get(ENVIRONMENT)
        os.environ[ENVIRONMENT] = str(self.armed)
        try:
            self._supervisor = bring_up(self.settings, timeout_s=START_TIMEOUT_S, modules={"reward": REWARD_MODULE})
        finally:
            os.environ.pop(ENVIRONMENT)
            if before is not None:
                os.environ[ENVIRONMENT] = before
        self.probe = HealthProbe(self.settings)
        self.client = Client(self.settings.coordinator_address, wait_for_ready=True)
        self._session = BrokerSession.connect(self.settings.mesh.address("broker"), self.settings.mesh.handle_socket,
                                              process="chaos", role="coordinator")
        self.client.register_reward(REWARD, self.settings.mesh.address("reward"), retries=REWARD_RETRIES)

    def close(self) -> None:
        """Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        with contextlib.suppress(RollplexError):
            self._session.close()
        self.client.close()
        self.probe.close()
        supervisor.shut_down(stop_timeout_s(self.settings))

    # Processes

    def pids(self) -> dict[str, int]:
        """Of the services that run, for two seconds or more."""
        return {process.name: process.pid for process in self._supervisor.processes()
                if process.state == "RUNNING" and process.name in SERVICES}

    def wait_whole(self, timeout_s: float = SETTLE_TIMEOUT_S) -> dict[str, int]:
        """Pids, once every service runs and serves. Raises DeadlineExceeded naming those that do not."""
        deadline = time.monotonic() + timeout_s
        while True:
            pids = self.pids()
            health = self.probe.ask() if len(pids) == len(SERVICES) else {}
            if health and all(state == "SERVING" for state in health.values()) and self.pids() == pids:
                return pids
            if time.monotonic() > deadline:
                missing = [name for name in SERVICES if name not in pids or health.get(name) != "SERVING"]
                raise DeadlineExceeded(f"after {timeout_s:g} s not back: {', '.join(missing)}", reason="MESH_NOT_WHOLE")
            time.sleep(POLL_S)

    def log_ends(self, count: int = 60) -> dict[str, str]:
        runtime_dir = self.settings.mesh.runtime_dir
        return {name: "\n".join(last_lines(log_path(runtime_dir, name), count)) for name in (*SERVICES, "watchdog")}

    # Points

    def arm(self, point: str, action: str, victim: int | str, nth: int) -> None:
        arm(self.armed, point, Order(new_id("order"), action, (victim,), nth))

    def disarm(self, point: str) -> bool:
        return disarm(self.armed, point)

    # Runs

    def new_run(self) -> None:
        """A fresh run, however often that must be asked for: a service that dies meanwhile is waited for."""
        self._runs += 1
        self.run, self.iterations = f"chaos-{self._runs}", 0
        self._until_answered(lambda: self.client.create_run(self.run, RUN_CONFIG), (RollplexError,))

    def prompts(self, iteration: int) -> list[Prompt]:
        still = Media("image", self.folder / "media" / f"still-{iteration % 2}.png")
        return [Prompt.text(f"Which colour is number {iteration}?", still, ground_truth="red"),
                Prompt.text(f"How many are {iteration} and 2?", ground_truth="2")]

    def submit(self) -> IterationHandle:
        """The next iteration, once; a coordinator that dies meanwhile is asked again by the same request."""
        request = new_id("request")
        handle = self._until_answered(
            lambda: self.client.submit_iteration(self.run, self.prompts(self.iterations), request_id=request))
        if handle.iteration != self.iterations:
            raise DataLoss(f"iteration {self.iterations} was submitted; the coordinator calls it {handle.iteration}",
                           reason="ITERATION_NUMBER")
        self.iterations += 1
        return handle

    def finish(self, handle: IterationHandle) -> Iteration:
        """Raises its error when it failed, DeadlineExceeded when nobody hears of its end."""
        ended: Future[Iteration] = Future()

        def wait() -> None:
            try:
                ended.set_result(self.client.wait(handle, give_up_s=GIVE_UP_S))
            except Exception as error:  # noqa: BLE001 - raised by whoever waits
                ended.set_exception(error)

        threading.Thread(target=wait, name="iteration", daemon=True).start()
        try:
            return ended.result(ITERATION_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(f"{handle.run}, iteration {handle.iteration}: no end was heard of within "
                                   f"{ITERATION_TIMEOUT_S:g} s", reason="ITERATION_NOT_ENDED") from None

    def ended(self, iteration: int) -> Ended:
        """What the newest ended iteration, whose number this is, has come to; after its durable checkpoint, if any."""
        files: dict[str, str] = {}
        with contextlib.suppress(NotFound):
            found = self._until_answered(lambda: self.client.durable_checkpoint(self.run))
            if found.next_iteration == iteration + 1:
                files = {name: entry.sha256 for name, entry in read_manifest(Path(found.path)).files.items()}
        return Ended(self._weights(self._until_answered(lambda: self.client.get_run(self.run)).snapshot), files)

    def _weights(self, snapshot: int) -> str:
        name = actor_slab(self.run, self.settings.mesh.topology.device_name(0))
        lease = self._until_answered(lambda: self._session.lease(name, LeaseMode.READ, snapshot=snapshot))
        with lease, mmap.mmap(lease.fd, lease.slab.size_bytes, prot=mmap.PROT_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()

    def counts(self, pids: Mapping[str, int]) -> leaks.Snapshot:
        return leaks.snapshot(pids, self._until_answered(self.client.mesh))

    @staticmethod
    def _until_answered(call: Callable[[], T], transient: tuple[type[RollplexError], ...] = (Unavailable, DeadlineExceeded)) -> T:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            try:
                return call()
            except transient:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    """Built and started; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rpx-"))
    try:
        made = Rig(folder)
        made.build()
        made.start()
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
