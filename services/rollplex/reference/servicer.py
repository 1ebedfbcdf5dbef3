"""ReferenceService: protos <-> core, nothing else."""

from __future__ import annotations

from grpc import aio

from rollplex.core import work
from rollplex.reference.engine import ReferenceEngine
from rollplex.rpc.convert import from_proto
from rollplex.rpc.phase_servicer import EngineHost
from rollplex.v1 import reference_service_pb2, reference_service_pb2_grpc, types_pb2


class ReferenceServicer(reference_service_pb2_grpc.ReferenceServiceServicer):
    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def StartMaterializePrefix(self, request: reference_service_pb2.StartReferencePrefixRequest,
                                     context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.PreparedGroup, group) for group in request.groups]
        engine: ReferenceEngine = self._host.engine
        return self._host.start(request.header, lambda work_context: engine.materialize_prefix(work_context, groups))

    async def StartScoreSuffix(self, request: reference_service_pb2.StartScoreSuffixRequest,
                               context: aio.ServicerContext) -> types_pb2.StartResponse:
        groups = [from_proto(work.ResponseGroup, group) for group in request.groups]
        temperature, keep = request.temperature, request.keep_boundaries
        engine: ReferenceEngine = self._host.engine
        return self._host.start(request.header, lambda work_context: engine.score_suffix(
            work_context, groups, temperature=temperature, keep_boundaries=keep))


def add_reference(server: aio.Server, host: EngineHost) -> str:
    """An AddRole."""
    reference_service_pb2_grpc.add_ReferenceServiceServicer_to_server(ReferenceServicer(host), server)
    return reference_service_pb2.DESCRIPTOR.services_by_name["ReferenceService"].full_name
