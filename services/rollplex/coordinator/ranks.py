"""One engine process as the coordinator reaches it: joining an epoch, a command started and watched, an abort."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from rollplex.core import work
from rollplex.core.errors import Aborted, DeadlineExceeded, NotFound, Unavailable
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.convert import from_proto
from rollplex.rpc.phase_servicer import RESULT_FIELDS
from rollplex.rpc.status import error_from_rpc, from_detail
from rollplex.v1 import phase_service_pb2, phase_service_pb2_grpc

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.1
LOST_AFTER_S = 15.0
"""How long a rank may be out of reach while it works: a broken connection comes back by itself, a dead process does not."""
PROBE_TIMEOUT_S = 1.0
RESULT_TYPES = {name: kind for kind, name in RESULT_FIELDS.items()}

OnSamples = Callable[[Sequence[work.FinishedSample]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank answered."""

    value: Any
    work_s: float


class Rank:
    """Rank `index` of a role's group."""

    def __init__(self, name: str, address: str, index: int) -> None:
        self.name, self.address, self.index = name, address, index
        self.channel = aio_channel(address)
        self.phase = phase_service_pb2_grpc.PhaseServiceStub(self.channel)
        self.joined: phase_service_pb2.JoinResponse | None = None
        self._lost_since: float | None = None

    async def ask(self, timeout_s: float) -> phase_service_pb2.JoinResponse:
        """As `join`, but nothing is joined: a process that was replaced must not come to its predecessor's epoch."""
        return await self.join(0, timeout_s)

    async def join(self, epoch: int, timeout_s: float) -> phase_service_pb2.JoinResponse:
        """Raises Unavailable, naming the rank, when it does not answer in time."""
        try:
            return await self.phase.Join(phase_service_pb2.JoinRequest(epoch=epoch), timeout=timeout_s,
                                         wait_for_ready=True)
        except grpc.RpcError as error:
            domain_error = error_from_rpc(error)
            if isinstance(domain_error, DeadlineExceeded | Unavailable):
                raise self._unreachable() from error
            raise domain_error from error

    async def lost(self) -> bool:
        """Whether the process that joined is gone, or stopped: it does not answer, or another one does."""
        try:
            answer = await self.phase.Join(phase_service_pb2.JoinRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return isinstance(error_from_rpc(error), DeadlineExceeded | Unavailable)
        return self.joined is None or answer.instance_id != self.joined.instance_id

    async def run(self, call: Callable[..., Awaitable[Any]], request: Any, deadline: float,
                  on_samples: OnSamples | None) -> Outcome:
        """Starts the command and watches it to its end; both are repeated after a broken connection."""
        command_id = request.header.command_id
        await self._start(lambda: call(request, timeout=_left(deadline)), deadline)
        cursor = 0
        while True:
            watch = self.phase.WatchCommand(
                phase_service_pb2.WatchCommandRequest(command_id=command_id, after_cursor=cursor),
                timeout=_left(deadline))
            try:
                async for response in watch:
                    cursor, self._lost_since = response.cursor, None
                    kind = response.WhichOneof("event")
                    if kind == "samples" and on_samples is not None:
                        await on_samples([from_proto(work.FinishedSample, sample)
                                          for sample in response.samples.samples])
                    elif kind == "failure":
                        raise from_detail(response.failure)
                    elif kind == "result":
                        return _outcome(response.result)
            except grpc.RpcError as error:
                self._resume_or_raise(error, deadline)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _start(self, attempt: Callable[[], Awaitable[Any]], deadline: float) -> None:
        self._lost_since = None
        while True:
            try:
                await attempt()
                return
            except grpc.RpcError as error:
                self._resume_or_raise(error, deadline)
                await asyncio.sleep(RETRY_PAUSE_S)

    def _resume_or_raise(self, error: grpc.RpcError, deadline: float) -> None:
        """Returns when the call may be repeated; raises the domain error otherwise."""
        domain_error = error_from_rpc(error)
        now = time.monotonic()
        # A call that its server cancels is one of a process that drains: our own end as asyncio.CancelledError.
        away = isinstance(domain_error, Unavailable) or error.code() is grpc.StatusCode.CANCELLED
        if away and now < deadline:
            self._lost_since = self._lost_since or now
            if now - self._lost_since < LOST_AFTER_S:
                return
            raise self._unreachable() from error
        if isinstance(domain_error, NotFound) or domain_error.reason == "STALE_EPOCH":
            raise Aborted(f"{self.name} was restarted while it worked", reason="ENGINE_RESTARTED",
                          service=self.name) from error
        raise domain_error from error

    async def abort(self, command_id: str) -> None:
        """Best effort: a dead engine has nothing left to abort."""
        try:
            await self.phase.AbortCommand(phase_service_pb2.AbortCommandRequest(command_id=command_id), timeout=2.0)
        except grpc.RpcError as error:
            log.info("%s: abort of %s: %s", self.name, command_id, error.code())

    def _unreachable(self) -> Unavailable:
        return Unavailable(f"{self.name} does not answer on {self.address}; `rollplex status` and "
                           f"`rollplex logs {self.name}` say more", reason="ENGINE_UNREACHABLE", service=self.name)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the phase ran into its deadline", reason="PHASE_TIMEOUT")
    return left


def _outcome(result: phase_service_pb2.CommandResult) -> Outcome:
    name = result.WhichOneof("result")
    return Outcome(from_proto(RESULT_TYPES[name], getattr(result, name)), result.work_s)
