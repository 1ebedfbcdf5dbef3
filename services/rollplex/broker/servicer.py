"""MemoryBrokerService: protos to core and back. Decides nothing."""

from __future__ import annotations

from google.protobuf.message import Message
from grpc import aio

from rollplex.broker.engine import Custody
from rollplex.broker.grants import Grants
from rollplex.core.errors import BadInput
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.core.work import ResidencyEntry
from rollplex.memory.slab import LedgerRow, Slab
from rollplex.rpc.convert import from_proto, to_proto
from rollplex.v1 import memory_broker_service_pb2 as pb
from rollplex.v1 import memory_broker_service_pb2_grpc as pb_grpc
from rollplex.v1 import types_pb2

MODES = {pb.LEASE_MODE_READ: LeaseMode.READ, pb.LEASE_MODE_WRITE: LeaseMode.WRITE}
PHASES = {types_pb2.PHASE_IDLE: Phase.IDLE, types_pb2.PHASE_OVERLAP: Phase.OVERLAP,
          types_pb2.PHASE_SUFFIX: Phase.SUFFIX, types_pb2.PHASE_UPDATE: Phase.UPDATE}


class BrokerServicer(pb_grpc.MemoryBrokerServiceServicer):
    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    def _grants(self) -> Grants:
        self._custody.expire_tickets()
        return self._custody.grants

    async def CreateSlab(self, request: pb.CreateSlabRequest, context: aio.ServicerContext) -> pb.CreateSlabResponse:
        ticket = self._custody.announce(request.session, from_proto(Slab, request.slab))
        return pb.CreateSlabResponse(deposit_ticket=ticket)

    async def ListSlabs(self, request: pb.ListSlabsRequest, context: aio.ServicerContext) -> pb.ListSlabsResponse:
        slabs = self._custody.list_slabs(request.name_prefix)
        return pb.ListSlabsResponse(slabs=[to_proto(slab, pb.Slab) for slab in slabs])

    async def DeleteSlab(self, request: pb.DeleteSlabRequest, context: aio.ServicerContext) -> pb.DeleteSlabResponse:
        return pb.DeleteSlabResponse(size_bytes=await self._custody.delete(request.session, request.name))

    async def AcquireLease(self, request: pb.AcquireLeaseRequest,
                           context: aio.ServicerContext) -> pb.AcquireLeaseResponse:
        mode = MODES.get(request.mode)
        if mode is None:
            raise BadInput("a lease needs a mode, READ or WRITE", reason="LEASE_MODE_REQUIRED")
        lease, ticket, slab = await self._custody.acquire(
            request.session, request.slab, mode, _optional(request, "snapshot"), _optional(request, "update_epoch"))
        return pb.AcquireLeaseResponse(lease_id=lease.lease_id, ticket=ticket, slab=to_proto(slab, pb.Slab))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest,
                           context: aio.ServicerContext) -> pb.ReleaseLeaseResponse:
        self._custody.release(request.session, request.lease_id)
        return pb.ReleaseLeaseResponse()

    async def RegisterSnapshot(self, request: pb.RegisterSnapshotRequest,
                               context: aio.ServicerContext) -> pb.RegisterSnapshotResponse:
        await self._grants().register_snapshot(request.run, tuple(request.slabs), request.snapshot)
        return pb.RegisterSnapshotResponse()

    async def BeginUpdate(self, request: pb.BeginUpdateRequest, context: aio.ServicerContext) -> pb.BeginUpdateResponse:
        epoch = await self._grants().begin_update(request.run, request.snapshot, frozenset(request.writers))
        return pb.BeginUpdateResponse(update_epoch=epoch)

    async def PublishSnapshot(self, request: pb.PublishSnapshotRequest,
                              context: aio.ServicerContext) -> pb.PublishSnapshotResponse:
        await self._grants().publish_snapshot(request.run, request.update_epoch, request.snapshot)
        return pb.PublishSnapshotResponse()

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: aio.ServicerContext) -> pb.GetSnapshotResponse:
        return to_proto(self._custody.get_snapshot(request.run), pb.GetSnapshotResponse)

    async def EnterPhase(self, request: pb.EnterPhaseRequest, context: aio.ServicerContext) -> pb.EnterPhaseResponse:
        phase = PHASES.get(request.phase)
        if phase is None:
            raise BadInput("EnterPhase needs a phase", reason="PHASE_REQUIRED")
        planned = [from_proto(PlannedBytes, item) for item in request.planned]
        readings = await self._custody.read_devices()
        return pb.EnterPhaseResponse(violations=self._custody.enter_phase(
            request.run, request.iteration, phase, planned, tuple(request.relaxed), readings,
            (request.caller, request.sequence)))

    async def ReportResidency(self, request: pb.ReportResidencyRequest,
                              context: aio.ServicerContext) -> pb.ReportResidencyResponse:
        self._custody.report(request.session, tuple(from_proto(ResidencyEntry, entry) for entry in request.entries))
        return pb.ReportResidencyResponse()

    async def GetLedger(self, request: pb.GetLedgerRequest, context: aio.ServicerContext) -> pb.GetLedgerResponse:
        ledger = self._custody.get_ledger(request.run)
        return pb.GetLedgerResponse(rows=_rows(ledger.rows), peaks=_rows(ledger.peaks),
                                    host_limit_bytes=ledger.host_limit_bytes, host_slab_bytes=ledger.host_slab_bytes,
                                    counts=ledger.counts)


def _optional(request: Message, name: str) -> int | None:
    return getattr(request, name) if request.HasField(name) else None


def _rows(rows: tuple[LedgerRow, ...]) -> list[pb.LedgerRow]:
    return [to_proto(row, pb.LedgerRow) for row in rows]
