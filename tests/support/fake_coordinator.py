"""A CoordinatorService in the test's process: an event log that can be written to, stopped and started again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from rollplex.core.errors import BadInput, NotFound, RollplexError
from rollplex.rpc.status import DETAILS_KEY, code_of, rich_status
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1 import coordinator_service_pb2_grpc, memory_broker_service_pb2, types_pb2


def fail(context: grpc.ServicerContext, error: RollplexError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, rich_status(error).SerializeToString()),))
    context.abort(code_of(error), str(error))


class FakeCoordinator(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """Journals what it is told. Iterations end when the test says so, or at once with `instant`."""

    def __init__(self, socket: Path, *, instant: bool = True) -> None:
        self.address = f"unix:{socket}"
        self.instant = instant
        self.events: list[pb.WatchRunResponse] = []
        self.submitted: list[list[pb.PromptGroup]] = []
        self.by_request: dict[str, pb.SubmitIterationResponse] = {}
        self.rewards: dict[str, pb.RewardRegistration] = {}
        self.streams = 0
        self.runs: dict[str, pb.Run] = {}
        self.counts = {False: 0, True: 0}
        self.bad_texts: set[str] = set()
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        with self._changed:
            self._changed.notify_all()

    def emit(self, iteration: int, validation: bool = False, **body: object) -> int:
        with self._changed:
            self.events.append(pb.WatchRunResponse(sequence=len(self.events) + 1, iteration=iteration,
                                                   validation=validation, **body))
            self._changed.notify_all()
            return len(self.events)

    def end(self, run: str, iteration: int, *, validation: bool = False, state: str = "DONE",
            error: types_pb2.ErrorDetail | None = None, **metrics: float) -> None:
        body = pb.Iteration(run=run, iteration=iteration, validation=validation, error=error,
                            state=pb.IterationState.Value(f"ITERATION_STATE_{state}"),
                            metrics={"reward": 1.0, "rewards/video_r1/accuracy/mean": 0.5, **metrics})
        self.emit(iteration, validation, iteration_state=body)

    def CreateRun(self, request, context):
        run = pb.Run(name=request.name, state=pb.RUN_STATE_ACTIVE, config_json=request.config_json)
        self.runs.setdefault(request.name, run)
        return pb.CreateRunResponse(run=self.runs[request.name])

    def GetRun(self, request, context):
        if request.name not in self.runs:
            fail(context, NotFound(f"no run {request.name!r}", reason="RUN_NOT_FOUND", run=request.name))
        run = pb.Run()
        run.CopyFrom(self.runs[request.name])
        run.last_sequence = len(self.events)
        return pb.GetRunResponse(run=run)

    def ListRuns(self, request, context):
        return pb.ListRunsResponse(runs=list(self.runs.values())[::-1])

    def SubmitIteration(self, request, context):
        return self._submit(request, context, validation=False)

    def SubmitValidation(self, request, context):
        return self._submit(request, context, validation=True)

    def _submit(self, request, context, *, validation: bool):
        if request.request_id in self.by_request:
            return self.by_request[request.request_id]
        bad = [index for index, group in enumerate(request.groups)
               if any(text in group.messages_json for text in self.bad_texts)]
        if bad:
            fail(context, BadInput(f"{len(bad)} of {len(request.groups)} prompts are refused", reason="MEDIA_EMPTY",
                                   indices=",".join(map(str, bad))))
        self.submitted.append(list(request.groups))
        number, after = self.counts[validation], len(self.events)
        self.counts[validation] += 1
        answer = pb.SubmitIterationResponse(after_sequence=after, iteration=pb.Iteration(
            run=request.run, iteration=number, validation=validation, state=pb.ITERATION_STATE_QUEUED))
        self.by_request[request.request_id] = answer
        self.emit(number, validation, phase=pb.PhaseEvent(phase=types_pb2.PHASE_OVERLAP, span="overlap"))
        if self.instant:
            self.end(request.run, number, validation=validation)
        return answer

    def WatchRun(self, request, context) -> Iterator[pb.WatchRunResponse]:
        if request.run not in self.runs:
            fail(context, NotFound(f"no run {request.run!r}", reason="RUN_NOT_FOUND"))
        self.streams += 1
        position = request.after_sequence
        while context.is_active():
            fresh = self._after(position, context)
            yield from fresh
            position += len(fresh)

    def _after(self, position: int, context: grpc.ServicerContext) -> list[pb.WatchRunResponse]:
        with self._changed:
            self._changed.wait_for(lambda: len(self.events) > position or not context.is_active(), timeout=0.5)
            return self.events[position:]

    def CancelIteration(self, request, context):
        self.end(request.run, request.iteration, validation=request.validation, state="CANCELLED")
        return pb.CancelIterationResponse(state=pb.ITERATION_STATE_CANCELLED)

    def ListSamples(self, request, context):
        ids = types_pb2.NumericArray(dtype="int64", shape=[2], data=b"\1" + b"\0" * 7 + b"\2" + b"\0" * 7)
        return pb.ListSamplesResponse(samples=[
            pb.SampleRecord(response_text="<answer>A</answer>", token_ids=ids, reward=1.5, advantage=0.5,
                            finish_reason="stop", parts={"video_r1/accuracy": 1.0}),
            pb.SampleRecord(sample_index=1, response_text="?", finish_reason="length")])

    def RegisterReward(self, request, context):
        self.rewards[request.reward.name] = request.reward
        return pb.RegisterRewardResponse(reward=request.reward)

    def UnregisterReward(self, request, context):
        if self.rewards.pop(request.name, None) is None:
            fail(context, NotFound(f"no reward {request.name!r}", reason="REWARD_NOT_FOUND"))
        return pb.UnregisterRewardResponse()

    def ListRewards(self, request, context):
        return pb.ListRewardsResponse(rewards=[pb.RewardHealth(reward=reward, reachable=True)
                                               for reward in self.rewards.values()])

    def ExportCheckpoint(self, request, context):
        return pb.ExportCheckpointResponse(size_bytes=len(request.path))

    def GetMesh(self, request, context):
        row = memory_broker_service_pb2.LedgerRow(object_class="media", role="coordinator", device="host",
                                                  phase=types_pb2.PHASE_OVERLAP, size_bytes=64, slab_count=1)
        return pb.GetMeshResponse(
            services=[pb.ServiceInfo(name="broker", address="unix:/b", health="SERVING", pid=7, bound_snapshot=-1)],
            open_run="r", phase=types_pb2.PHASE_IDLE,
            ledger=memory_broker_service_pb2.GetLedgerResponse(peaks=[row], host_slab_bytes=64))
