"""CoordinatorService: translates protos, decides nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.coordinator import records
from rollplex.coordinator.engine import Coordinator
from rollplex.coordinator.rewards import describe
from rollplex.core import errors
from rollplex.core.config import MeshSection
from rollplex.core.errors import BadInput
from rollplex.data.rows import MediaRef, PromptRow
from rollplex.memory.slab import Ledger
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.convert import array_to_proto, to_proto
from rollplex.rpc.status import code_of
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1 import coordinator_service_pb2_grpc, memory_broker_service_pb2, types_pb2

PROBE_TIMEOUT_S = 2.0


class CoordinatorServicer(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """`services` are the mesh's names, in the order in which GetMesh lists them."""

    def __init__(self, coordinator: Coordinator, mesh: MeshSection, services: list[str]) -> None:
        self._coordinator, self._mesh, self._services = coordinator, mesh, services

    async def CreateRun(self, request: pb.CreateRunRequest, context: aio.ServicerContext) -> pb.CreateRunResponse:
        run = await self._coordinator.create_run(request.name, request.config_json, request.resume)
        return pb.CreateRunResponse(run=self._run(run))

    async def GetRun(self, request: pb.GetRunRequest, context: aio.ServicerContext) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._run(self._coordinator.runs.get(request.name)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: aio.ServicerContext) -> pb.ListRunsResponse:
        runs = sorted(self._coordinator.runs, key=lambda run: -run.create_time_s)
        return pb.ListRunsResponse(runs=[self._run(run) for run in runs])

    async def SubmitIteration(self, request: pb.SubmitIterationRequest,
                              context: aio.ServicerContext) -> pb.SubmitIterationResponse:
        return await self._submit(request, validation=False)

    async def SubmitValidation(self, request: pb.SubmitValidationRequest,
                               context: aio.ServicerContext) -> pb.SubmitIterationResponse:
        return await self._submit(request, validation=True)

    async def _submit(self, request: Any, *, validation: bool) -> pb.SubmitIterationResponse:
        rows = [read_row(index, group) for index, group in enumerate(request.groups)]
        iteration, before = await self._coordinator.submit(request.run, rows, request.request_id, validation=validation)
        return pb.SubmitIterationResponse(iteration=_iteration(iteration), after_sequence=before)

    async def GetIteration(self, request: pb.GetIterationRequest, context: aio.ServicerContext) -> pb.GetIterationResponse:
        return pb.GetIterationResponse(iteration=_iteration(await self._coordinator.iteration(_key(request))))

    async def WatchRun(self, request: pb.WatchRunRequest, context: aio.ServicerContext) -> AsyncIterator[pb.WatchRunResponse]:
        async for event in self._coordinator.watch(request.run, request.after_sequence):
            yield _event(event)

    async def CancelIteration(self, request: pb.CancelIterationRequest,
                              context: aio.ServicerContext) -> pb.CancelIterationResponse:
        state = await self._coordinator.cancel(_key(request))
        return pb.CancelIterationResponse(state=_iteration_state(state))

    async def ListSamples(self, request: pb.ListSamplesRequest, context: aio.ServicerContext) -> pb.ListSamplesResponse:
        samples = await self._coordinator.samples(_key(request))
        return pb.ListSamplesResponse(samples=[pb.SampleRecord(
            group_index=sample.group_index, sample_index=sample.sample_index, response_text=sample.text,
            token_ids=array_to_proto(sample.token_ids), reward=sample.reward, advantage=sample.advantage,
            finish_reason=sample.finish_reason, parts=sample.parts) for sample in samples])

    async def RegisterReward(self, request: pb.RegisterRewardRequest,
                             context: aio.ServicerContext) -> pb.RegisterRewardResponse:
        wanted = request.reward
        reward = records.RewardRegistration(wanted.name, wanted.address, wanted.weight, wanted.timeout_s or 30.0,
                                            wanted.retries)
        await self._coordinator.rewards.register(reward)
        return pb.RegisterRewardResponse(reward=to_proto(reward, pb.RewardRegistration))

    async def UnregisterReward(self, request: pb.UnregisterRewardRequest,
                               context: aio.ServicerContext) -> pb.UnregisterRewardResponse:
        await self._coordinator.rewards.unregister(request.name)
        return pb.UnregisterRewardResponse()

    async def ListRewards(self, request: pb.ListRewardsRequest, context: aio.ServicerContext) -> pb.ListRewardsResponse:
        rewards = self._coordinator.rewards.all()
        failures = await asyncio.gather(*(describe(reward, PROBE_TIMEOUT_S) for reward in rewards))
        return pb.ListRewardsResponse(rewards=[
            pb.RewardHealth(reward=to_proto(reward, pb.RewardRegistration), reachable=not failure, error=failure)
            for reward, failure in zip(rewards, failures)])

    async def ExportCheckpoint(self, request: pb.ExportCheckpointRequest,
                               context: aio.ServicerContext) -> pb.ExportCheckpointResponse:
        result = await self._coordinator.export(request.run, request.path)
        return pb.ExportCheckpointResponse(size_bytes=result.size_bytes)

    async def GetDurableCheckpoint(self, request: pb.GetDurableCheckpointRequest,
                                   context: aio.ServicerContext) -> pb.GetDurableCheckpointResponse:
        found = await self._coordinator.checkpoints.newest(request.run)
        return pb.GetDurableCheckpointResponse(path=str(found.path), next_iteration=found.manifest.next_iteration,
                                               snapshot=found.manifest.snapshot)

    async def GetMesh(self, request: pb.GetMeshRequest, context: aio.ServicerContext) -> pb.GetMeshResponse:
        services = await asyncio.gather(*(self._probe(name) for name in self._services))
        ledger = await self._coordinator.mesh.broker(lambda session: session.ledger())
        run = self._coordinator.runs.open
        return pb.GetMeshResponse(
            services=services, open_run=run.name if run else "",
            phase=types_pb2.Phase.Value(f"PHASE_{self._coordinator.current_phase.value.upper()}"), ledger=_ledger(ledger))

    async def _probe(self, name: str) -> pb.ServiceInfo:
        """Health as the service itself says it; pid and snapshot as the engine said when it joined."""
        address = self._mesh.address(name)
        async with aio_channel(address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
                health = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            except grpc.RpcError:
                health = "UNREACHABLE"
        joined = self._coordinator.mesh.joined(name)
        return pb.ServiceInfo(name=name, address=address, health=health, pid=joined.pid if joined else 0,
                              bound_snapshot=joined.bound_snapshot if joined else -1)

    def _run(self, run: records.Run) -> pb.Run:
        return pb.Run(name=run.name, state=pb.RunState.Value(f"RUN_STATE_{run.state.value.upper()}"),
                      config_json=run.config_json, snapshot=run.snapshot, next_iteration=run.next_iteration,
                      create_time=_time(run.create_time_s), last_sequence=self._coordinator.runs.last_sequence(run),
                      replay_iterations=run.replay_iterations)


def _key(request: Any) -> records.IterationKey:
    return records.IterationKey(request.run, request.iteration, request.validation)


def _time(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _iteration_state(state: records.IterationState) -> int:
    return pb.IterationState.Value(f"ITERATION_STATE_{state.value.upper()}")


def _iteration(iteration: records.Iteration) -> pb.Iteration:
    message = pb.Iteration(
        run=iteration.key.run, iteration=iteration.key.iteration, validation=iteration.key.validation,
        state=_iteration_state(iteration.state), snapshot=iteration.snapshot, metrics=iteration.metrics,
        create_time=_time(iteration.create_time_s))
    if iteration.end_time_s is not None:
        message.end_time.CopyFrom(_time(iteration.end_time_s))
    if iteration.error is not None:
        message.error.CopyFrom(_error(iteration.error))
    return message


def _error(record: records.ErrorRecord) -> types_pb2.ErrorDetail:
    kind = getattr(errors, record.kind)
    return types_pb2.ErrorDetail(code=code_of(kind(record.message)).value[0], reason=record.reason,
                                 message=record.message, metadata=record.metadata)


def _event(event: records.Event) -> pb.WatchRunResponse:
    message = pb.WatchRunResponse(sequence=event.sequence, time=_time(event.time_s), iteration=event.iteration,
                                  validation=event.validation)
    body = event.body
    if isinstance(body, records.PhaseSpan):
        message.phase.CopyFrom(to_proto(body, pb.PhaseEvent))
    elif isinstance(body, records.ProgressReport):
        message.progress.CopyFrom(to_proto(body, pb.ProgressEvent))
    elif isinstance(body, records.Note):
        message.note.CopyFrom(to_proto(body, pb.NoteEvent))
    else:
        message.iteration_state.CopyFrom(_iteration(records.iteration_from_json(body.iteration)))
    return message


def read_row(index: int, group: pb.PromptGroup) -> PromptRow:
    try:
        messages, columns = json.loads(group.messages_json), json.loads(group.columns_json or "{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"prompt {index}: messages_json or columns_json is no JSON: {error}", reason="BAD_PROMPT",
                       indices=index) from error

    if not isinstance(columns, dict):
        raise BadInput(f"prompt {index}: columns_json is no JSON object", reason="BAD_PROMPT", indices=index)

    def optional(message: Any, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    def limits(source: pb.MediaSource) -> dict[str, Any]:
        names = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
        return {name: optional(source, name) for name in names}

    media = tuple(MediaRef(source.kind, source.path, tuple(source.frame_paths), **limits(source)) for source in group.media)
    return PromptRow(index, messages, media, optional(group, "ground_truth"), optional(group, "problem_type"),
                     optional(group, "data_source"), columns)


def _ledger(ledger: Ledger) -> memory_broker_service_pb2.GetLedgerResponse:
    return to_proto(ledger, memory_broker_service_pb2.GetLedgerResponse)
