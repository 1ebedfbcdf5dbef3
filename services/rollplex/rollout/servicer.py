"""RolloutService: protos <-> core, nothing else."""

from __future__ import annotations

from grpc import aio

from rollplex.core import work
from rollplex.rollout.engine import RolloutEngine
from rollplex.rpc.convert import from_proto
from rollplex.rpc.phase_servicer import EngineHost
from rollplex.v1 import rollout_service_pb2, rollout_service_pb2_grpc, types_pb2


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def StartGenerate(self, request: rollout_service_pb2.StartGenerateRequest,
                            context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.PreparedGroup, group) for group in request.groups]
        sampling = from_proto(work.Sampling, request.sampling)
        snapshot, iteration = request.header.snapshot, request.header.iteration
        engine: RolloutEngine = self._host.engine
        return self._host.start(request.header, lambda work_context: engine.generate(
            work_context, groups, sampling, snapshot=snapshot, iteration=iteration))


def add_rollout(server: aio.Server, host: EngineHost) -> str:
    """An AddRole."""
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(host), server)
    return rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
