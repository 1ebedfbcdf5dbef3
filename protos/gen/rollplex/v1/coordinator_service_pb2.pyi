import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from rollplex.v1 import memory_broker_service_pb2 as _memory_broker_service_pb2
from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_OPENING: _ClassVar[RunState]
    RUN_STATE_ACTIVE: _ClassVar[RunState]
    RUN_STATE_RECOVERING: _ClassVar[RunState]
    RUN_STATE_CLOSED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]

class IterationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITERATION_STATE_UNSPECIFIED: _ClassVar[IterationState]
    ITERATION_STATE_QUEUED: _ClassVar[IterationState]
    ITERATION_STATE_RUNNING: _ClassVar[IterationState]
    ITERATION_STATE_DONE: _ClassVar[IterationState]
    ITERATION_STATE_FAILED: _ClassVar[IterationState]
    ITERATION_STATE_CANCELLED: _ClassVar[IterationState]
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_OPENING: RunState
RUN_STATE_ACTIVE: RunState
RUN_STATE_RECOVERING: RunState
RUN_STATE_CLOSED: RunState
RUN_STATE_FAILED: RunState
ITERATION_STATE_UNSPECIFIED: IterationState
ITERATION_STATE_QUEUED: IterationState
ITERATION_STATE_RUNNING: IterationState
ITERATION_STATE_DONE: IterationState
ITERATION_STATE_FAILED: IterationState
ITERATION_STATE_CANCELLED: IterationState

class Run(_message.Message):
    __slots__ = ("name", "state", "config_json", "snapshot", "next_iteration", "create_time", "last_sequence", "replay_iterations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NEXT_ITERATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: RunState
    config_json: str
    snapshot: int
    next_iteration: int
    create_time: _timestamp_pb2.Timestamp
    last_sequence: int
    replay_iterations: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., config_json: _Optional[str] = ..., snapshot: _Optional[int] = ..., next_iteration: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_sequence: _Optional[int] = ..., replay_iterations: _Optional[int] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("run", "iteration", "validation", "state", "snapshot", "metrics", "error", "create_time", "end_time")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    validation: bool
    state: IterationState
    snapshot: int
    metrics: _containers.ScalarMap[str, float]
    error: _types_pb2.ErrorDetail
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., validation: bool = ..., state: _Optional[_Union[IterationState, str]] = ..., snapshot: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PromptGroup(_message.Message):
    __slots__ = ("messages_json", "media", "ground_truth", "problem_type", "data_source", "columns_json")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    media: _containers.RepeatedCompositeFieldContainer[MediaSource]
    ground_truth: str
    problem_type: str
    data_source: str
    columns_json: str
    def __init__(self, messages_json: _Optional[str] = ..., media: _Optional[_Iterable[_Union[MediaSource, _Mapping]]] = ..., ground_truth: _Optional[str] = ..., problem_type: _Optional[str] = ..., data_source: _Optional[str] = ..., columns_json: _Optional[str] = ...) -> None: ...

class MediaSource(_message.Message):
    __slots__ = ("kind", "path", "frame_paths", "fps", "max_frames", "min_pixels", "max_pixels", "total_pixels", "min_frames")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FRAME_PATHS_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MIN_FRAMES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    path: str
    frame_paths: _containers.RepeatedScalarFieldContainer[str]
    fps: float
    max_frames: int
    min_pixels: int
    max_pixels: int
    total_pixels: int
    min_frames: int
    def __init__(self, kind: _Optional[str] = ..., path: _Optional[str] = ..., frame_paths: _Optional[_Iterable[str]] = ..., fps: _Optional[float] = ..., max_frames: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., total_pixels: _Optional[int] = ..., min_frames: _Optional[int] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("name", "config_json", "resume")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    name: str
    config_json: str
    resume: str
    def __init__(self, name: _Optional[str] = ..., config_json: _Optional[str] = ..., resume: _Optional[str] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class SubmitIterationRequest(_message.Message):
    __slots__ = ("run", "groups", "request_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    groups: _containers.RepeatedCompositeFieldContainer[PromptGroup]
    request_id: str
    def __init__(self, run: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PromptGroup, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class SubmitValidationRequest(_message.Message):
    __slots__ = ("run", "groups", "request_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    groups: _containers.RepeatedCompositeFieldContainer[PromptGroup]
    request_id: str
    def __init__(self, run: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PromptGroup, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class SubmitIterationResponse(_message.Message):
    __slots__ = ("iteration", "after_sequence")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    after_sequence: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class GetIterationRequest(_message.Message):
    __slots__ = ("run", "iteration", "validation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    validation: bool
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., validation: bool = ...) -> None: ...

class GetIterationResponse(_message.Message):
    __slots__ = ("iteration",)
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run", "after_sequence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    after_sequence: int
    def __init__(self, run: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchRunResponse(_message.Message):
    __slots__ = ("sequence", "time", "iteration", "validation", "phase", "progress", "iteration_state", "note")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_STATE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    iteration: int
    validation: bool
    phase: PhaseEvent
    progress: ProgressEvent
    iteration_state: Iteration
    note: NoteEvent
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., iteration: _Optional[int] = ..., validation: bool = ..., phase: _Optional[_Union[PhaseEvent, _Mapping]] = ..., progress: _Optional[_Union[ProgressEvent, _Mapping]] = ..., iteration_state: _Optional[_Union[Iteration, _Mapping]] = ..., note: _Optional[_Union[NoteEvent, _Mapping]] = ...) -> None: ...

class PhaseEvent(_message.Message):
    __slots__ = ("phase", "ended", "span", "duration_s", "start_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    phase: _types_pb2.Phase
    ended: bool
    span: str
    duration_s: float
    start_s: float
    def __init__(self, phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., ended: bool = ..., span: _Optional[str] = ..., duration_s: _Optional[float] = ..., start_s: _Optional[float] = ...) -> None: ...

class ProgressEvent(_message.Message):
    __slots__ = ("samples_done", "samples_total", "samples_scored", "response_tokens", "reward_mean")
    SAMPLES_DONE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_SCORED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    samples_done: int
    samples_total: int
    samples_scored: int
    response_tokens: int
    reward_mean: float
    def __init__(self, samples_done: _Optional[int] = ..., samples_total: _Optional[int] = ..., samples_scored: _Optional[int] = ..., response_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ...) -> None: ...

class NoteEvent(_message.Message):
    __slots__ = ("level", "reason", "message")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    level: str
    reason: str
    message: str
    def __init__(self, level: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CancelIterationRequest(_message.Message):
    __slots__ = ("run", "iteration", "validation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    validation: bool
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., validation: bool = ...) -> None: ...

class CancelIterationResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: IterationState
    def __init__(self, state: _Optional[_Union[IterationState, str]] = ...) -> None: ...

class ListSamplesRequest(_message.Message):
    __slots__ = ("run", "iteration", "validation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    validation: bool
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., validation: bool = ...) -> None: ...

class ListSamplesResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleRecord]
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleRecord, _Mapping]]] = ...) -> None: ...

class SampleRecord(_message.Message):
    __slots__ = ("group_index", "sample_index", "response_text", "token_ids", "reward", "advantage", "finish_reason", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    sample_index: int
    response_text: str
    token_ids: _types_pb2.NumericArray
    reward: float
    advantage: float
    finish_reason: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, group_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., response_text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., reward: _Optional[float] = ..., advantage: _Optional[float] = ..., finish_reason: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RewardRegistration(_message.Message):
    __slots__ = ("name", "address", "weight", "timeout_s", "retries")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    weight: float
    timeout_s: float
    retries: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., weight: _Optional[float] = ..., timeout_s: _Optional[float] = ..., retries: _Optional[int] = ...) -> None: ...

class RegisterRewardRequest(_message.Message):
    __slots__ = ("reward",)
    REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: RewardRegistration
    def __init__(self, reward: _Optional[_Union[RewardRegistration, _Mapping]] = ...) -> None: ...

class RegisterRewardResponse(_message.Message):
    __slots__ = ("reward",)
    REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: RewardRegistration
    def __init__(self, reward: _Optional[_Union[RewardRegistration, _Mapping]] = ...) -> None: ...

class UnregisterRewardRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnregisterRewardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRewardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRewardsResponse(_message.Message):
    __slots__ = ("rewards",)
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[RewardHealth]
    def __init__(self, rewards: _Optional[_Iterable[_Union[RewardHealth, _Mapping]]] = ...) -> None: ...

class RewardHealth(_message.Message):
    __slots__ = ("reward", "reachable", "error")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reward: RewardRegistration
    reachable: bool
    error: str
    def __init__(self, reward: _Optional[_Union[RewardRegistration, _Mapping]] = ..., reachable: bool = ..., error: _Optional[str] = ...) -> None: ...

class ExportCheckpointRequest(_message.Message):
    __slots__ = ("run", "path")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    run: str
    path: str
    def __init__(self, run: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ExportCheckpointResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class GetDurableCheckpointRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetDurableCheckpointResponse(_message.Message):
    __slots__ = ("path", "next_iteration", "snapshot")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ITERATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    path: str
    next_iteration: int
    snapshot: int
    def __init__(self, path: _Optional[str] = ..., next_iteration: _Optional[int] = ..., snapshot: _Optional[int] = ...) -> None: ...

class GetMeshRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMeshResponse(_message.Message):
    __slots__ = ("services", "open_run", "phase", "ledger")
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    OPEN_RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceInfo]
    open_run: str
    phase: _types_pb2.Phase
    ledger: _memory_broker_service_pb2.GetLedgerResponse
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceInfo, _Mapping]]] = ..., open_run: _Optional[str] = ..., phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., ledger: _Optional[_Union[_memory_broker_service_pb2.GetLedgerResponse, _Mapping]] = ...) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("name", "address", "health", "pid", "bound_snapshot")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BOUND_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    health: str
    pid: int
    bound_snapshot: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., health: _Optional[str] = ..., pid: _Optional[int] = ..., bound_snapshot: _Optional[int] = ...) -> None: ...
