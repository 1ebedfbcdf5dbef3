from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("instance_id", "role", "rank", "tensor_parallel_size", "open_run", "bound_snapshot", "pid", "layout_hash", "next_sequence", "residency", "kv_pool_bytes")
    class ResidencyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    OPEN_RUN_FIELD_NUMBER: _ClassVar[int]
    BOUND_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: str
    rank: int
    tensor_parallel_size: int
    open_run: str
    bound_snapshot: int
    pid: int
    layout_hash: str
    next_sequence: int
    residency: _containers.ScalarMap[str, str]
    kv_pool_bytes: int
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., open_run: _Optional[str] = ..., bound_snapshot: _Optional[int] = ..., pid: _Optional[int] = ..., layout_hash: _Optional[str] = ..., next_sequence: _Optional[int] = ..., residency: _Optional[_Mapping[str, str]] = ..., kv_pool_bytes: _Optional[int] = ...) -> None: ...

class StartOpenRunRequest(_message.Message):
    __slots__ = ("header", "run_config_json", "attach")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RUN_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    run_config_json: str
    attach: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., run_config_json: _Optional[str] = ..., attach: bool = ...) -> None: ...

class StartBindSnapshotRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class StartQuiesceRequest(_message.Message):
    __slots__ = ("header", "leave_snapshot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LEAVE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    leave_snapshot: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., leave_snapshot: bool = ...) -> None: ...

class WatchCommandRequest(_message.Message):
    __slots__ = ("command_id", "after_cursor")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_CURSOR_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    after_cursor: int
    def __init__(self, command_id: _Optional[str] = ..., after_cursor: _Optional[int] = ...) -> None: ...

class WatchCommandResponse(_message.Message):
    __slots__ = ("cursor", "progress", "samples", "result", "failure")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    progress: Progress
    samples: SamplesFinished
    result: CommandResult
    failure: _types_pb2.ErrorDetail
    def __init__(self, cursor: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., samples: _Optional[_Union[SamplesFinished, _Mapping]] = ..., result: _Optional[_Union[CommandResult, _Mapping]] = ..., failure: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done_count", "total_count", "unit")
    DONE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    done_count: int
    total_count: int
    unit: str
    def __init__(self, done_count: _Optional[int] = ..., total_count: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...

class SamplesFinished(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[FinishedSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[FinishedSample, _Mapping]]] = ...) -> None: ...

class FinishedSample(_message.Message):
    __slots__ = ("group_index", "sample_index", "token_ids", "logprobs", "finish_reason")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    sample_index: int
    token_ids: _types_pb2.NumericArray
    logprobs: _types_pb2.NumericArray
    finish_reason: str
    def __init__(self, group_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., token_ids: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., logprobs: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("open_run", "bind", "quiesce", "generate", "prefix", "score", "suffix", "gradient", "update", "checkpoint", "work_s")
    OPEN_RUN_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    QUIESCE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    open_run: OpenRunResult
    bind: BindResult
    quiesce: QuiesceResult
    generate: GenerateResult
    prefix: PrefixResult
    score: ScoreResult
    suffix: SuffixResult
    gradient: GradientResult
    update: UpdateResult
    checkpoint: CheckpointResult
    work_s: float
    def __init__(self, open_run: _Optional[_Union[OpenRunResult, _Mapping]] = ..., bind: _Optional[_Union[BindResult, _Mapping]] = ..., quiesce: _Optional[_Union[QuiesceResult, _Mapping]] = ..., generate: _Optional[_Union[GenerateResult, _Mapping]] = ..., prefix: _Optional[_Union[PrefixResult, _Mapping]] = ..., score: _Optional[_Union[ScoreResult, _Mapping]] = ..., suffix: _Optional[_Union[SuffixResult, _Mapping]] = ..., gradient: _Optional[_Union[GradientResult, _Mapping]] = ..., update: _Optional[_Union[UpdateResult, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointResult, _Mapping]] = ..., work_s: _Optional[float] = ...) -> None: ...

class OpenRunResult(_message.Message):
    __slots__ = ("actor_slab", "actor_bytes", "snapshot", "parameter_count")
    ACTOR_SLAB_FIELD_NUMBER: _ClassVar[int]
    ACTOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    actor_slab: str
    actor_bytes: int
    snapshot: int
    parameter_count: int
    def __init__(self, actor_slab: _Optional[str] = ..., actor_bytes: _Optional[int] = ..., snapshot: _Optional[int] = ..., parameter_count: _Optional[int] = ...) -> None: ...

class BindResult(_message.Message):
    __slots__ = ("snapshot", "bound_parameters", "inodes", "copied_bytes")
    class InodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BOUND_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    bound_parameters: int
    inodes: _containers.ScalarMap[str, int]
    copied_bytes: int
    def __init__(self, snapshot: _Optional[int] = ..., bound_parameters: _Optional[int] = ..., inodes: _Optional[_Mapping[str, int]] = ..., copied_bytes: _Optional[int] = ...) -> None: ...

class QuiesceResult(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class GenerateResult(_message.Message):
    __slots__ = ("prompt_tokens", "response_tokens", "prefill_s", "decode_s", "prompt_hashes", "decode_steps", "decode_rows")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    response_tokens: int
    prefill_s: float
    decode_s: float
    prompt_hashes: _containers.RepeatedScalarFieldContainer[str]
    decode_steps: int
    decode_rows: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., prompt_hashes: _Optional[_Iterable[str]] = ..., decode_steps: _Optional[int] = ..., decode_rows: _Optional[int] = ...) -> None: ...

class PrefixResult(_message.Message):
    __slots__ = ("prompt_hashes", "boundary_bytes", "saved_bytes")
    PROMPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    prompt_hashes: _containers.RepeatedScalarFieldContainer[str]
    boundary_bytes: int
    saved_bytes: int
    def __init__(self, prompt_hashes: _Optional[_Iterable[str]] = ..., boundary_bytes: _Optional[int] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleLogprobs]
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleLogprobs, _Mapping]]] = ...) -> None: ...

class SampleLogprobs(_message.Message):
    __slots__ = ("group_index", "sample_index", "logprobs")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    sample_index: int
    logprobs: _types_pb2.NumericArray
    def __init__(self, group_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ...) -> None: ...

class SuffixResult(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GradientResult(_message.Message):
    __slots__ = ("grad_norm", "finite")
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    grad_norm: float
    finite: bool
    def __init__(self, grad_norm: _Optional[float] = ..., finite: bool = ...) -> None: ...

class UpdateResult(_message.Message):
    __slots__ = ("chunk_count", "state_bytes", "peak_state_bytes")
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk_count: int
    state_bytes: int
    peak_state_bytes: int
    def __init__(self, chunk_count: _Optional[int] = ..., state_bytes: _Optional[int] = ..., peak_state_bytes: _Optional[int] = ...) -> None: ...

class CheckpointResult(_message.Message):
    __slots__ = ("path", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class AbortCommandRequest(_message.Message):
    __slots__ = ("command_id",)
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    def __init__(self, command_id: _Optional[str] = ...) -> None: ...

class AbortCommandResponse(_message.Message):
    __slots__ = ("aborting",)
    ABORTING_FIELD_NUMBER: _ClassVar[int]
    aborting: bool
    def __init__(self, aborting: bool = ...) -> None: ...
