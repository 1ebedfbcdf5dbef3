"""The engines as the coordinator reaches them: one group a role, commands fanned out to every rank in one order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import grpc

from rollplex.coordinator.orders import Order
from rollplex.core import work
from rollplex.core.errors import Aborted, DeadlineExceeded, NotFound, RollplexError, Unavailable, WrongState
from rollplex.core.ids import new_id
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.convert import from_proto
from rollplex.rpc.phase_servicer import RESULT_FIELDS
from rollplex.rpc.status import error_from_rpc, from_detail
from rollplex.v1 import phase_service_pb2, phase_service_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.1
RESULT_TYPES = {name: kind for kind, name in RESULT_FIELDS.items()}

OnSamples = Callable[[Sequence[work.FinishedSample]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank answered."""

    value: Any
    work_s: float


@dataclass(slots=True)
class Place:
    """Where a command stands: what its header says beside the order."""

    run: str
    iteration: int
    snapshot: int
    timeout_s: float


class Rank:
    """One engine process."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.channel = aio_channel(address)
        self.phase = phase_service_pb2_grpc.PhaseServiceStub(self.channel)
        self.joined: phase_service_pb2.JoinResponse | None = None

    async def join(self, epoch: int, timeout_s: float) -> phase_service_pb2.JoinResponse:
        """Raises Unavailable, naming the rank, when it does not answer in time."""
        try:
            return await self.phase.Join(phase_service_pb2.JoinRequest(epoch=epoch), timeout=timeout_s,
                                         wait_for_ready=True)
        except grpc.RpcError as error:
            domain_error = error_from_rpc(error)
            if isinstance(domain_error, DeadlineExceeded | Unavailable):
                raise Unavailable(f"{self.name} does not answer on {self.address}; `rollplex status` and "
                                  f"`rollplex logs {self.name}` say more", reason="ENGINE_UNREACHABLE",
                                  service=self.name) from error
            raise domain_error from error

    async def run(self, call: Callable[..., Awaitable[Any]], request: Any, deadline: float,
                  on_samples: OnSamples | None) -> Outcome:
        """Starts the command and watches it to its end; both are repeated after a broken connection."""
        command_id = request.header.command_id
        await self._with_retries(lambda: call(request, timeout=_left(deadline), wait_for_ready=True), deadline)
        cursor = 0
        while True:
            watch = self.phase.WatchCommand(
                phase_service_pb2.WatchCommandRequest(command_id=command_id, after_cursor=cursor),
                timeout=_left(deadline), wait_for_ready=True)
            try:
                async for response in watch:
                    cursor = response.cursor
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

    async def _with_retries(self, attempt: Callable[[], Awaitable[Any]], deadline: float) -> None:
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
        if isinstance(domain_error, Unavailable) and time.monotonic() < deadline:
            return
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


class EngineGroup:
    """The ranks of one role, in one epoch."""

    def __init__(self, role: str, addresses: dict[str, str], make_stub: Callable[[grpc.aio.Channel], Any]) -> None:
        self.role = role
        self.ranks = [Rank(name, address) for name, address in addresses.items()]
        self._stubs = [make_stub(rank.channel) for rank in self.ranks]
        self._epoch = 0
        self._sequence = 0
        self._must_rejoin = True
        self._broken_by: BaseException | None = None

    async def ensure_joined(self) -> bool:
        """True when the group is in a new epoch: a rank was replaced, or the last command broke off."""
        if not self._must_rejoin:
            answers = await asyncio.gather(*(rank.join(self._epoch, JOIN_TIMEOUT_S) for rank in self.ranks))
            if all(rank.joined and answer.instance_id == rank.joined.instance_id
                   for rank, answer in zip(self.ranks, answers)):
                self._remember(answers)
                return False
        await self._join_new_epoch()
        return True

    async def _join_new_epoch(self) -> None:
        epoch = self._epoch + 1
        while True:
            try:
                answers = await asyncio.gather(*(rank.join(epoch, JOIN_TIMEOUT_S) for rank in self.ranks))
            except WrongState as error:
                # An earlier coordinator went further than this one knows.
                epoch = int(error.metadata["epoch"]) + 1
                continue
            if all(answer.next_sequence == 1 for answer in answers):
                break
            # The epoch is an earlier coordinator's: its commands would stand in our order.
            epoch += 1
        if len({answer.layout_hash for answer in answers}) > 1:
            raise WrongState(f"ranks of {self.role} hold different models or layouts", reason="LAYOUT_MISMATCH")
        self._remember(answers)
        self._epoch, self._sequence, self._must_rejoin = epoch, 0, False

    def _remember(self, answers: Sequence[phase_service_pb2.JoinResponse]) -> None:
        for rank, answer in zip(self.ranks, answers):
            rank.joined = answer

    @property
    def states(self) -> list[phase_service_pb2.JoinResponse]:
        """What the ranks said when they joined."""
        return [rank.joined for rank in self.ranks if rank.joined is not None]

    async def command(self, order: Order, place: Place, *, on_samples: OnSamples | None = None) -> list[Outcome]:
        """Runs one command on every rank. Outcomes come by rank.

        The first failure aborts the others and is raised with the role's rank in front; after it the group rejoins.
        """
        if self._must_rejoin:
            raise Unavailable(f"{self.role} has not joined again since: {self._broken_by or 'it was never there'}",
                              reason="ENGINE_NOT_JOINED")
        self._sequence += 1
        request = order.request
        request.header.CopyFrom(types_pb2.CommandHeader(
            command_id=new_id("command"), epoch=self._epoch, sequence=self._sequence, run=place.run,
            iteration=place.iteration, snapshot=place.snapshot))
        request.header.timeout.FromTimedelta(timedelta(seconds=place.timeout_s))
        deadline = time.monotonic() + place.timeout_s + 2.0
        tasks = [asyncio.create_task(rank.run(self._call(stub, rank, order.method), request, deadline, on_samples))
                 for rank, stub in zip(self.ranks, self._stubs)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            self._must_rejoin, self._broken_by = True, error
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(rank.abort(request.header.command_id) for rank in self.ranks))
            if isinstance(error, RollplexError):
                raise type(error)(f"{self.role}: {error}", reason=error.reason, **error.metadata) from error
            raise

    @staticmethod
    def _call(stub: Any, rank: Rank, method: str) -> Callable[..., Awaitable[Any]]:
        return getattr(stub, method, None) or getattr(rank.phase, method)

    async def close(self) -> None:
        for rank in self.ranks:
            await rank.channel.close()


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Runs them side by side. The first failure cancels the others, which abort their engines, and is raised once all have
    ended: no command of theirs is left behind to end in somebody else's epoch."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in started]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the phase ran into its deadline", reason="PHASE_TIMEOUT")
    return left


def _outcome(result: phase_service_pb2.CommandResult) -> Outcome:
    name = result.WhichOneof("result")
    return Outcome(from_proto(RESULT_TYPES[name], getattr(result, name)), result.work_s)
