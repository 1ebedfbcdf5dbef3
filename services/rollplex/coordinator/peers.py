"""The engines as the coordinator reaches them: one group a role, commands fanned out to every rank in one order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import grpc

from rollplex.coordinator.orders import Order
from rollplex.coordinator.ranks import OnSamples, Outcome, Rank
from rollplex.core.errors import Aborted, RollplexError, Unavailable, WrongState, as_domain_error
from rollplex.core.ids import new_id
from rollplex.core.phases import Phase
from rollplex.core.replicas import Replicas
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import phase_service_pb2, types_pb2

T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0
FAILURE_GRACE_S = 0.5
"""A lost rank breaks its peers' collectives. All that fail together are heard before one of them is blamed."""
PEER_REASONS = ("PEER_LOST", "PEER_FAILED", "COLLECTIVE_TIMEOUT", "NO_COMMUNICATOR")
"""Of a rank that could not go on because of another one, which its error's `rank` names where it is known."""


@dataclass(slots=True)
class Place:
    """Where a command stands: what its header says beside the order."""

    run: str
    iteration: int
    snapshot: int
    timeout_s: float
    phase: Phase = Phase.IDLE


class EngineGroup:
    """The ranks of one role, in one epoch. A replica of rollout is a group of one process, however many devices it has."""

    def __init__(self, role: str, addresses: dict[str, str], make_stub: Callable[[grpc.aio.Channel], Any],
                 replicas: Replicas | None = None) -> None:
        """`replicas`: MeshSection.replicas; absent: one."""
        self.role, self.replicas = role, replicas or Replicas(len(addresses), len(addresses))
        self.ranks = [Rank(name, address, index) for index, (name, address) in enumerate(addresses.items())]
        self._stubs = [make_stub(rank.channel) for rank in self.ranks]
        # Above every epoch of earlier coordinators and meshes: ranks meet at a place that is named by it.
        self._epoch = int(time.time() * 1000)
        self._sequence = 0
        self._must_rejoin = True
        self._broken_by: BaseException | None = None
        self.admit: Callable[[Sequence[Rank]], Awaitable[None]] = _admit_all
        """Told of ranks that have joined; raises WrongState for one that does not fit."""

    @property
    def name(self) -> str:
        """Of the unit that is lost and restarted as a whole: the service, or the role where it has several ranks."""
        return self.ranks[0].name if len(self.ranks) == 1 else self.role

    async def silent(self) -> list[str]:
        """The ranks that are gone, stopped or replaced."""
        answers = await asyncio.gather(*(rank.lost() for rank in self.ranks))
        return [rank.name for rank, is_lost in zip(self.ranks, answers) if is_lost]

    async def check_replaced(self, services: str) -> None:
        """Raises Unavailable while one of these ranks (names, comma-separated) is still the process that has joined, or does
        not answer."""
        for rank in self.ranks:
            if rank.name not in services.split(", ") or rank.joined is None:
                continue
            if (await rank.ask(JOIN_TIMEOUT_S)).instance_id == rank.joined.instance_id:
                raise Unavailable(f"{rank.name} has not ended yet", reason="ENGINE_UNREACHABLE", service=rank.name)

    async def ensure_joined(self) -> bool:
        """True when the group is in a new epoch: a rank was replaced, or the last command broke off."""
        if not self._must_rejoin:
            answers = await asyncio.gather(*(rank.ask(JOIN_TIMEOUT_S) for rank in self.ranks))
            if all(rank.joined and answer.instance_id == rank.joined.instance_id
                   for rank, answer in zip(self.ranks, answers)):
                self._remember(answers)
                return False
        await self._join_new_epoch()
        return True

    async def _join_new_epoch(self) -> None:
        self._must_rejoin = True
        while True:
            # No epoch is tried twice: a rank that came and went again would be waited for.
            self._epoch += 1
            try:
                answers = await asyncio.gather(*(rank.join(self._epoch, JOIN_TIMEOUT_S) for rank in self.ranks))
            except WrongState as error:
                # An earlier coordinator went further than this one knows.
                self._epoch = int(error.metadata["epoch"])
                continue
            # Else the epoch is an earlier coordinator's: its commands would stand in our order.
            if all(answer.next_sequence == 1 for answer in answers):
                break
        self._check(answers)
        self._remember(answers)
        try:
            await self.admit(self.ranks)
        except BaseException:
            # What was refused is no measure for others.
            for rank in self.ranks:
                rank.joined = None
            raise
        self._sequence, self._must_rejoin = 0, False

    def _check(self, answers: Sequence[phase_service_pb2.JoinResponse]) -> None:
        if self.role == "rollout":
            return
        for rank, answer in zip(self.ranks, answers):
            if (answer.rank, answer.tensor_parallel_size) != (rank.index, len(self.ranks)):
                raise WrongState(f"{rank.name} says that it is rank {answer.rank} of {answer.tensor_parallel_size}; the mesh "
                                 f"has it as rank {rank.index} of {len(self.ranks)}: give all services the same [mesh] "
                                 "section", reason="TOPOLOGY_MISMATCH", service=rank.name)

    def _remember(self, answers: Sequence[phase_service_pb2.JoinResponse]) -> None:
        for rank, answer in zip(self.ranks, answers):
            rank.joined = answer

    @property
    def states(self) -> list[phase_service_pb2.JoinResponse]:
        """What the ranks said when they joined."""
        return [rank.joined for rank in self.ranks if rank.joined is not None]

    async def command(self, order: Order, place: Place, *, on_samples: OnSamples | None = None) -> list[Outcome]:
        """Runs one command on every rank. Outcomes come by rank.

        A failure of any rank aborts the others and is raised with the rank and the phase in front; after it the group
        rejoins.
        """
        if self._must_rejoin:
            raise Unavailable(f"{self.role} has not joined again since: {self._broken_by or 'it was never there'}",
                              reason="ENGINE_NOT_JOINED", service=self.name, phase=place.phase.value)
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
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if not _failures(self.ranks, tasks):
                return [task.result() for task in tasks]
            if pending:
                await asyncio.wait(pending, timeout=FAILURE_GRACE_S)
            raise await self._failure(_failures(self.ranks, tasks), place)
        except BaseException as error:
            self._must_rejoin, self._broken_by = True, error
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(rank.abort(request.header.command_id) for rank in self.ranks))
            raise

    async def _failure(self, failures: dict[Rank, RollplexError], place: Place) -> RollplexError:
        """The error to raise: of a rank that is gone if there is one, else of one that did not only miss its peers."""
        lost = []
        if len(self.ranks) > 1:
            answers = await asyncio.gather(*(rank.lost() for rank in self.ranks))
            lost = [rank for rank, is_lost in zip(self.ranks, answers) if is_lost]
        blamed = min(failures, key=lambda rank: (rank not in lost, failures[rank].reason in PEER_REASONS, rank.index))
        where = f"in {place.phase.name}"
        heard = [f"{rank.name}: {error}" for rank, error in failures.items()]
        if lost and (blamed not in lost or failures[blamed].reason in ("ENGINE_RESTARTED", "ENGINE_UNREACHABLE")):
            names = ", ".join(rank.name for rank in lost)
            return Aborted(f"{names} {where}: died, was replaced or does not answer ({'; '.join(heard)})", reason="RANK_LOST",
                           service=names, phase=place.phase.value)
        error = failures[blamed]
        silent = [rank.name for rank in self.ranks if rank not in failures]
        others = [text for rank, text in zip(failures, heard) if rank is not blamed]
        if silent:
            others.append(f"still busy: {', '.join(silent)}")
        tail = f" ({'; '.join(others)})" if others else ""
        culprit = error.metadata.get("rank", "") if error.reason in PEER_REASONS else ""
        name = self.ranks[int(culprit)].name if culprit.isdigit() else blamed.name
        metadata = {**error.metadata, "service": name, "phase": place.phase.value}
        return type(error)(f"{blamed.name} {where}: {error}{tail}", reason=error.reason, **metadata)

    async def ask_each(self, method: str, request: Any, timeout_s: float) -> list[Any]:
        """One call to every rank, beside its commands and out of their order. Raises a rank's error, its name in front; the
        group need not rejoin."""
        async def ask(rank: Rank, stub: Any) -> Any:
            try:
                return await self._call(stub, rank, method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                domain_error = error_from_rpc(error)
                raise type(domain_error)(f"{rank.name}: {domain_error}", reason=domain_error.reason,
                                         **{**domain_error.metadata, "service": rank.name}) from error

        return await together(*(ask(rank, stub) for rank, stub in zip(self.ranks, self._stubs)))

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


async def _admit_all(ranks: Sequence[Rank]) -> None:
    """Of a group outside a mesh."""


def _failures(ranks: Sequence[Rank], tasks: Sequence[asyncio.Task[Outcome]]) -> dict[Rank, RollplexError]:
    """Of the ranks whose command has failed."""
    return {rank: as_domain_error(task.exception()) for rank, task in zip(ranks, tasks)
            if task.done() and not task.cancelled() and task.exception() is not None}
