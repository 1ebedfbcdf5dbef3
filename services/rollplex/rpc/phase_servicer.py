"""PhaseService for any engine, and the wiring that the three engine services share."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from grpc import aio

from rollplex.core import work
from rollplex.core.config import RunConfig
from rollplex.core.errors import BadInput, RollplexError
from rollplex.core.ids import new_id
from rollplex.core.strict import parse
from rollplex.rpc.commands import Command, CommandBoard, Progress, Result
from rollplex.rpc.convert import to_proto
from rollplex.rpc.status import to_detail
from rollplex.v1 import phase_service_pb2, phase_service_pb2_grpc, types_pb2

RESULT_FIELDS = {
    work.OpenRunResult: "open_run",
    work.BindResult: "bind",
    work.QuiesceResult: "quiesce",
    work.GenerateResult: "generate",
    work.PrefixResult: "prefix",
    work.ScoreResult: "score",
    work.SuffixResult: "suffix",
    work.GradientResult: "gradient",
    work.UpdateResult: "update",
    work.CheckpointResult: "checkpoint",
}


class PhaseEngine(Protocol):
    """What every engine offers. All methods but the attributes run on the owner thread."""

    role: str
    rank: int
    tensor_parallel_size: int
    layout_facts: Mapping[str, str]
    """What must agree before pages are shared, by name."""
    layout_hash: str
    """Digest of these."""
    open_run_name: str
    """Empty when no run is open."""
    bound_snapshot: int
    """-1 when none is bound."""
    # Optional, for the plan of an iteration: `residency: Mapping[str, str]` and `kv_pool_bytes: int`, as JoinResponse has them.

    def open_run(self, context: work.WorkContext, run: str, snapshot: int, config: RunConfig, attach: bool
                 ) -> work.OpenRunResult: ...

    def bind_snapshot(self, context: work.WorkContext, snapshot: int) -> work.BindResult: ...

    def quiesce(self, context: work.WorkContext, leave_snapshot: bool) -> work.QuiesceResult: ...

    def close(self) -> None: ...


class EpochMember(Protocol):
    """What an engine with ranks offers as its attribute `communicator`."""

    def announce(self, epoch: int) -> None:
        """Any thread: this epoch is wanted now, and no earlier one; -1 when the process ends."""

    def enter(self, epoch: int) -> None:
        """Owner thread: meets the other ranks; before the epoch's first command."""


class EngineHost:
    """An engine, its owner thread and its command board."""

    def __init__(self, engine: PhaseEngine, owner_thread: ThreadPoolExecutor,
                 on_failure: Callable[[RollplexError], None] = lambda error: None) -> None:
        self.engine = engine
        self.board = CommandBoard(owner_thread, on_failure)
        self.instance_id = new_id(engine.role)
        self._owner = owner_thread
        self._member: EpochMember | None = getattr(engine, "communicator", None)

    def join(self, epoch: int) -> None:
        """Enters an epoch. The ranks meet on the owner thread, where the epoch's commands wait for it."""
        self.board.join(epoch)
        if self._member is not None:
            self._member.announce(epoch)
            self._owner.submit(self._member.enter, epoch)

    def abort_all(self) -> None:
        """Asks everything on the owner thread to end."""
        self.board.abort_all()
        if self._member is not None:
            self._member.announce(-1)

    def start(self, header: types_pb2.CommandHeader, run: Callable[[Command], Any]) -> types_pb2.StartResponse:
        """Enqueues `run(context)` under the header's identity."""
        timeout_s = header.timeout.ToTimedelta().total_seconds()
        if not header.command_id or timeout_s <= 0:
            raise BadInput("a command needs command_id and a timeout above 0", reason="BAD_COMMAND_HEADER")
        replayed = self.board.start(header.command_id, header.epoch, header.sequence, timeout_s, run)
        return types_pb2.StartResponse(command_id=header.command_id, replayed=replayed)


class PhaseServicer(phase_service_pb2_grpc.PhaseServiceServicer):
    """Translates PhaseService calls for an EngineHost."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Join(self, request: phase_service_pb2.JoinRequest,
                   context: aio.ServicerContext) -> phase_service_pb2.JoinResponse:
        if request.epoch:
            self._host.join(request.epoch)
        engine = self._host.engine
        return phase_service_pb2.JoinResponse(
            instance_id=self._host.instance_id, role=engine.role, rank=engine.rank,
            tensor_parallel_size=engine.tensor_parallel_size, open_run=engine.open_run_name,
            bound_snapshot=engine.bound_snapshot, pid=os.getpid(), layout_hash=engine.layout_hash,
            next_sequence=self._host.board.next_sequence, residency=getattr(engine, "residency", {}),
            kv_pool_bytes=getattr(engine, "kv_pool_bytes", 0))

    async def StartOpenRun(self, request: phase_service_pb2.StartOpenRunRequest,
                           context: aio.ServicerContext) -> types_pb2.StartResponse:
        config = parse(RunConfig, json.loads(request.run_config_json or "{}"))
        header = request.header
        return self._host.start(header, lambda work_context: self._host.engine.open_run(
            work_context, header.run, header.snapshot, config, request.attach))

    async def StartBindSnapshot(self, request: phase_service_pb2.StartBindSnapshotRequest,
                                context: aio.ServicerContext) -> types_pb2.StartResponse:
        return self._host.start(request.header, lambda work_context: self._host.engine.bind_snapshot(
            work_context, request.header.snapshot))

    async def StartQuiesce(self, request: phase_service_pb2.StartQuiesceRequest,
                           context: aio.ServicerContext) -> types_pb2.StartResponse:
        return self._host.start(request.header, lambda work_context: self._host.engine.quiesce(
            work_context, request.leave_snapshot))

    async def WatchCommand(self, request: phase_service_pb2.WatchCommandRequest, context: aio.ServicerContext
                           ) -> AsyncIterator[phase_service_pb2.WatchCommandResponse]:
        async for cursor, event in self._host.board.watch(request.command_id, request.after_cursor):
            yield self._response(cursor, event)

    async def AbortCommand(self, request: phase_service_pb2.AbortCommandRequest,
                           context: aio.ServicerContext) -> phase_service_pb2.AbortCommandResponse:
        return phase_service_pb2.AbortCommandResponse(aborting=self._host.board.abort(request.command_id))

    def _response(self, cursor: int, event: Any) -> phase_service_pb2.WatchCommandResponse:
        response = phase_service_pb2.WatchCommandResponse(cursor=cursor)
        if isinstance(event, Progress):
            response.progress.CopyFrom(to_proto(event, phase_service_pb2.Progress))
        elif isinstance(event, RollplexError):
            response.failure.CopyFrom(to_detail(event))
        elif isinstance(event, Result):
            response.result.work_s = event.work_s
            name = RESULT_FIELDS[type(event.value)]
            message = getattr(response.result, name)
            message.CopyFrom(to_proto(event.value, type(message)))
        else:
            response.samples.samples.extend(to_proto(sample, phase_service_pb2.FinishedSample) for sample in event)
        return response
