"""Ranks 1, 2, ... of a replica: processes that the leader spawns, commands in one order, and tells apart when one is lost.

A private socket a worker carries frames of rollplex.rpc.handles. `post` is not answered: what fails there ends the worker.
`ask` is: a refusal comes back as the error that it is. A worker leaves when its socket ends, whatever it is doing, so none
outlives its leader.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from rollplex.core.errors import RollplexError
from rollplex.core.strict import to_plain
from rollplex.rollout.config import RolloutConfig
from rollplex.rollout.engine import ReplicaBroken
from rollplex.rpc.handles import encode, raise_error_frame, recv_frame, send_data

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_GRACE_S = 2.0
"""How long ranks that saw a collective break have to say so; whoever does not is the one that hangs."""


def process_name(replica: int, rank: int) -> str:
    """`rollout-0` leads `rollout-0.1`, `rollout-0.2`, ..."""
    return f"rollout-{replica}" + (f".{rank}" if rank else "")


@dataclass(eq=False)
class Worker:
    rank: int
    process: subprocess.Popen
    socket: socket.socket
    last_words: dict[str, Any] | None = None


class Workers:
    """Owner thread only. With one rank there are none, and nothing is done."""

    def __init__(self, config: RolloutConfig, replica: int) -> None:
        self._config, self._replica = config, replica
        self._workers: list[Worker] = []

    @property
    def whole(self) -> bool:
        """Whether every rank is there and nothing has broken the group."""
        count = self._config.mesh.topology.rollout_tp - 1
        return len(self._workers) == count and all(worker.process.poll() is None for worker in self._workers)

    def start(self) -> None:
        """Spawns the processes; they load while the leader does."""
        for rank in range(1, self._config.mesh.topology.rollout_tp):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "rollplex.rollout.worker", str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._workers.append(Worker(rank, process, ours))
        place = {"config": to_plain(self._config), "replica": self._replica}
        for worker in self._workers:
            self._send(worker, encode(place | {"rank": worker.rank}), None, "start")

    def meet(self, store: str) -> None:
        """Returns once every worker has loaded and is about to join the group; the leader joins it next."""
        for worker in self._workers:
            self._receive(worker, _START_TIMEOUT_S, "start")
        self.post({"op": "join", "store": store}, "start")

    def post(self, message: dict[str, Any], phase: str, fd: int | None = None) -> None:
        """To every worker, in one order. Raises BadInput for a message too large, ReplicaBroken."""
        data = encode(message) if self._workers else b""
        for worker in self._workers:
            self._send(worker, data, fd, phase)

    def ask(self, message: dict[str, Any], phase: str) -> list[dict[str, Any] | RollplexError]:
        """Every worker's answer or refusal, by rank."""
        self.post(message, phase)
        answers: list[dict[str, Any] | RollplexError] = []
        for worker in self._workers:
            frame = self._receive(worker, self._config.mesh.collective_timeout_s, phase)
            try:
                raise_error_frame(frame)
                answers.append(frame)
            except RollplexError as error:
                answers.append(error)
        return answers

    @contextlib.contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Around what ranks do at the same time: a failure of torch.distributed inside is a lost rank."""
        try:
            yield
        except RollplexError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever broke, the ranks are not at one place any more
            if not self._workers:
                raise
            self.lose(phase, error)

    def lose(self, phase: str, error: BaseException) -> NoReturn:
        """Ends what is left of the group. Raises ReplicaBroken with the rank that failed first, as far as can be told."""
        rank, what = self._culprit(error)
        self.kill()
        name = process_name(self._replica, rank)
        raise ReplicaBroken(f"{name} (rank {rank} of {self._config.mesh.topology.rollout_tp}) {what} during {phase}",
                            process=name, rank=rank, phase=phase) from error

    def stop(self) -> None:
        """Lets every worker leave its slab and say goodbye."""
        with contextlib.suppress(ReplicaBroken):
            self.post({"op": "stop"}, "stop")
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Idempotent. Afterwards no process is left and none of them holds a lease."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.socket.close()
        self._workers = []

    def _send(self, worker: Worker, data: bytes, fd: int | None, phase: str) -> None:
        worker.socket.settimeout(self._config.mesh.collective_timeout_s)
        try:
            send_data(worker.socket, data, fd)
        except OSError as error:
            self.lose(phase, error)

    def _receive(self, worker: Worker, timeout_s: float, phase: str) -> dict[str, Any]:
        worker.socket.settimeout(timeout_s)
        try:
            frame = recv_frame(worker.socket)
        except OSError as error:
            self.lose(phase, error)
        if frame is None or "fatal" in frame[0]:
            worker.last_words = frame[0] if frame else None
            self.lose(phase, EOFError(f"{process_name(self._replica, worker.rank)} has ended"))
        return frame[0]

    def _culprit(self, error: BaseException) -> tuple[int, str]:
        """Who broke the group. Ranks that only saw it break say so and leave; one that hangs says nothing."""
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            self._hear_out(worker, deadline)
        victims = []
        for worker in self._workers:
            code, words = worker.process.poll(), worker.last_words
            if words is not None and words["collective"]:
                victims.append(worker.rank)
            elif words is not None:
                return worker.rank, f"failed with {words['fatal']}"
            elif code is not None:
                cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                return worker.rank, cause
        silent = [worker.rank for worker in self._workers if worker.rank not in victims]
        return (silent[0], "does not answer") if silent else (0, f"failed with {type(error).__name__}: {error}")

    def _hear_out(self, worker: Worker, deadline: float) -> None:
        """Reads up to the worker's end, or until the deadline."""
        poller = select.poll()
        poller.register(worker.socket.fileno(), select.POLLIN)
        # A reset: it ended before it had read what we sent.
        with contextlib.suppress(ConnectionResetError):
            while poller.poll(max(0, deadline - time.monotonic()) * 1000):
                frame = recv_frame(worker.socket)
                if frame is None:
                    break
                if "fatal" in frame[0]:
                    worker.last_words = frame[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.1, deadline - time.monotonic()))
