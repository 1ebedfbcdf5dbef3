"""`python -m rollplex.rollout.worker FD`: one rank of a replica, spawned and commanded by its leader. Not for the command line.

Frames on the socket FD: the options first, then operations, in the order in which the leader does the same.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollplex.core.errors import InternalError, RollplexError
from rollplex.core.imports import uncollected
from rollplex.core.strict import parse
from rollplex.core.topology import torch_device
from rollplex.rollout.config import RolloutConfig
from rollplex.rpc.handles import encode, error_frame, recv_frame, send_data

if TYPE_CHECKING:
    from rollplex.model import DecodeState, PromptInputs
    from rollplex.rollout.shard import RankShard


class _Cancelled(Exception):
    """The leader gave a batch up while its prompts were being prefilled."""


class Worker:
    """Does on this rank what the leader says: methods by name of the operation."""

    def __init__(self, sock: socket.socket, config: RolloutConfig, rank: int, shard: RankShard) -> None:
        self._socket, self._config, self._rank, self._shard = sock, config, rank, shard
        self._states: dict[int, DecodeState] = {}
        self._operations = {"join": self.join, "bind": self.bind, "unbind": self.unbind, "start": self.start,
                            "step": self.step, "keep": self.keep, "release": self.release, "drop": self.drop}

    def serve(self) -> None:
        """Until the leader says stop, or is gone."""
        while True:
            message, _ = self._next()
            if message["op"] == "stop":
                return
            operation = self._operations.get(message.pop("op"))
            if operation is None:
                raise InternalError("an operation that this worker does not know; leader and worker differ in version")
            operation(**message)

    def join(self, store: str) -> None:
        from rollplex.model import init_tensor_parallel

        init_tensor_parallel(self._rank, self._config.mesh.topology.rollout_tp, store=store,
                             timeout_s=self._config.mesh.collective_timeout_s, device=torch_device(self._shard.device))
        self._shard.join()

    def bind(self, run: str, snapshot: int) -> None:
        try:
            self._shard.open(run)
            _, inode = self._shard.bind(snapshot)
        except RollplexError as error:
            self._answer(error_frame(error))
        else:
            self._answer({"device": self._shard.device, "inode": inode})

    def unbind(self) -> None:
        self._shard.unbind()
        self._answer({})

    def start(self, state: int, limit: int) -> None:
        try:
            self._states[state] = self._shard.decoder.start(self._prompts(), limit)
        except _Cancelled:
            return
        self._account()

    def step(self, state: int, tokens: list[int] | None) -> None:
        import torch

        fed = None if tokens is None else torch.tensor(tokens)
        self._shard.decoder.step(self._states[state], fed)

    def keep(self, state: int, kept: list[bool]) -> None:
        self._states[state].keep_groups(kept)
        self._account()

    def release(self, state: int) -> None:
        self._states.pop(state).release()
        self._account()

    def drop(self) -> None:
        self._states.clear()
        self._answer({"released": self._shard.drop()})

    def _prompts(self) -> Iterator[tuple[PromptInputs, int]]:
        from rollplex.rollout.prompt_frames import unpack_prompt

        while True:
            message, fd = self._next()
            if message["op"] == "started":
                return
            if message["op"] == "cancel":
                raise _Cancelled
            yield unpack_prompt(message, fd), message["count"]

    def _account(self) -> None:
        self._shard.keys_values.set(sum(state.size_bytes for state in self._states.values()))

    def _next(self) -> tuple[dict[str, Any], int | None]:
        frame = recv_frame(self._socket)
        if frame is None:
            raise EOFError("the leader has gone")
        return frame

    def _answer(self, message: dict[str, Any]) -> None:
        send_data(self._socket, encode(message))


def main() -> int:
    # A signal to the process group is for the leader, which drains and then lets its workers go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    threading.Thread(target=_leave_with_the_leader, args=[sock.fileno()], daemon=True).start()
    frame = recv_frame(sock)
    if frame is None:
        return 1
    try:
        _run(sock, frame[0])
    except Exception as error:  # noqa: BLE001 - the leader is told, and this rank ends
        from rollplex.engine.communicator import is_collective

        text = f"{type(error).__name__}: {error}"[:2048]
        send_data(sock, encode({"fatal": text, "collective": is_collective(error)}))
        raise
    return 0


def _run(sock: socket.socket, place: dict[str, Any]) -> None:
    config, replica, rank = parse(RolloutConfig, place["config"]), place["replica"], place["rank"]
    with uncollected():
        from rollplex.model import destroy_tensor_parallel
        from rollplex.rollout.server import build_shard
        from rollplex.rollout.workers import process_name
        from rollplex.rpc.server import configure_logging

    configure_logging(process_name(replica, rank))
    shard = build_shard(config, replica, rank)
    send_data(sock, encode({"ready": os.getpid()}))
    Worker(sock, config, rank, shard).serve()
    shard.close()
    destroy_tensor_parallel()


def _leave_with_the_leader(fd: int) -> None:
    """Not PR_SET_PDEATHSIG: that follows the thread that spawned us, not its process."""
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
