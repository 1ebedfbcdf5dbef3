"""TrainerService: protos <-> core, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import aio

from rollplex.core import work
from rollplex.rpc.convert import from_proto, to_proto
from rollplex.rpc.phase_servicer import EngineHost
from rollplex.trainer.engine import TrainerEngine
from rollplex.v1 import reference_service_pb2, trainer_service_pb2, trainer_service_pb2_grpc, types_pb2


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def StartMaterializePrefix(self, request: trainer_service_pb2.StartTrainerPrefixRequest,
                                     context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.PreparedGroup, group) for group in request.groups]
        return self._start(request.header, lambda engine, work_context: engine.materialize_prefix(
            work_context, groups), snapshot=request.header.snapshot)

    async def StartScoreSuffix(self, request: reference_service_pb2.StartScoreSuffixRequest,
                               context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.ResponseGroup, group) for group in request.groups]
        temperature, keep = request.temperature, request.keep_boundaries
        return self._start(request.header, lambda engine, work_context: engine.score_suffix(
            work_context, groups, temperature=temperature, keep_boundaries=keep), snapshot=request.header.snapshot)

    async def StartTrainSuffix(self, request: trainer_service_pb2.StartTrainSuffixRequest,
                               context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.ResponseGroup, group) for group in request.groups]
        scale = from_proto(work.LossScale, request.scale)
        return self._start(request.header, lambda engine, work_context: engine.train_suffix(
            work_context, groups, scale), snapshot=request.header.snapshot)

    async def StartMeasureGradient(self, request: trainer_service_pb2.StartMeasureGradientRequest,
                                   context: aio.ServicerContext) -> types_pb2.StartResponse:
        return self._start(request.header, lambda engine, work_context: engine.measure_gradient(work_context))

    async def StartApplyUpdate(self, request: trainer_service_pb2.StartApplyUpdateRequest,
                               context: aio.ServicerContext) -> types_pb2.StartResponse:
        order = from_proto(work.UpdateOrder, request)
        return self._start(request.header, lambda engine, work_context: engine.apply_update(work_context, order))

    async def StartExportCheckpoint(self, request: trainer_service_pb2.StartExportCheckpointRequest,
                                    context: aio.ServicerContext) -> types_pb2.StartResponse:
        path = Path(request.path)
        return self._start(request.header, lambda engine, work_context: engine.export_checkpoint(
            work_context, path), snapshot=request.header.snapshot)

    async def StartWriteCheckpoint(self, request: trainer_service_pb2.StartWriteCheckpointRequest,
                                   context: aio.ServicerContext) -> types_pb2.StartResponse:
        path = Path(request.path)
        return self._start(request.header, lambda engine, work_context: engine.write_checkpoint(
            work_context, path), snapshot=request.header.snapshot)

    async def StartRestoreCheckpoint(self, request: trainer_service_pb2.StartRestoreCheckpointRequest,
                                     context: aio.ServicerContext) -> types_pb2.StartResponse:
        path, step, digest = Path(request.path), request.optimizer_step, request.layout_digest
        return self._start(request.header, lambda engine, work_context: engine.restore_checkpoint(
            work_context, path, step, digest))

    async def WaitCheckpoint(self, request: trainer_service_pb2.WaitCheckpointRequest,
                             context: aio.ServicerContext) -> trainer_service_pb2.WaitCheckpointResponse:
        # A caller that goes away leaves the writer alone.
        written = await asyncio.shield(asyncio.wrap_future(self._host.engine.durable.outcome(request.path)))
        return to_proto(written, trainer_service_pb2.WaitCheckpointResponse)

    def _start(self, header: types_pb2.CommandHeader, run: Callable[[TrainerEngine, work.WorkContext], Any], *,
               snapshot: int | None = None) -> types_pb2.StartResponse:
        """Enqueues `run`, behind the engine's own check of run and snapshot when its turn comes."""
        engine: TrainerEngine = self._host.engine
        name = header.run

        def execute(work_context: work.WorkContext) -> Any:
            engine.require(name, snapshot)
            return run(engine, work_context)

        return self._host.start(header, execute)


def add_trainer(server: aio.Server, host: EngineHost) -> str:
    """An AddRole."""
    trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(host), server)
    return trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
