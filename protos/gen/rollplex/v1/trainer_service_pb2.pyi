from rollplex.v1 import reference_service_pb2 as _reference_service_pb2
from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartTrainerPrefixRequest(_message.Message):
    __slots__ = ("header", "groups")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.PreparedGroup]
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.PreparedGroup, _Mapping]]] = ...) -> None: ...

class StartTrainSuffixRequest(_message.Message):
    __slots__ = ("header", "groups", "scale")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    groups: _containers.RepeatedCompositeFieldContainer[_reference_service_pb2.ResponseGroup]
    scale: LossScale
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[_reference_service_pb2.ResponseGroup, _Mapping]]] = ..., scale: _Optional[_Union[LossScale, _Mapping]] = ...) -> None: ...

class LossScale(_message.Message):
    __slots__ = ("sample_count", "token_count", "max_response_tokens")
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sample_count: int
    token_count: int
    max_response_tokens: int
    def __init__(self, sample_count: _Optional[int] = ..., token_count: _Optional[int] = ..., max_response_tokens: _Optional[int] = ...) -> None: ...

class StartMeasureGradientRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class StartApplyUpdateRequest(_message.Message):
    __slots__ = ("header", "update_epoch", "clip_coefficient", "learning_rate_factor", "optimizer_step", "skip")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIP_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    update_epoch: int
    clip_coefficient: float
    learning_rate_factor: float
    optimizer_step: int
    skip: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., update_epoch: _Optional[int] = ..., clip_coefficient: _Optional[float] = ..., learning_rate_factor: _Optional[float] = ..., optimizer_step: _Optional[int] = ..., skip: bool = ...) -> None: ...

class StartExportCheckpointRequest(_message.Message):
    __slots__ = ("header", "path")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    path: str
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...

class StartWriteCheckpointRequest(_message.Message):
    __slots__ = ("header", "path")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    path: str
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...

class StartRestoreCheckpointRequest(_message.Message):
    __slots__ = ("header", "path", "optimizer_step", "layout_digest")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    path: str
    optimizer_step: int
    layout_digest: str
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., path: _Optional[str] = ..., optimizer_step: _Optional[int] = ..., layout_digest: _Optional[str] = ...) -> None: ...

class WaitCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class WaitCheckpointResponse(_message.Message):
    __slots__ = ("size_bytes", "layout_digest", "dtype", "state_dtype")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    layout_digest: str
    dtype: str
    state_dtype: str
    def __init__(self, size_bytes: _Optional[int] = ..., layout_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., state_dtype: _Optional[str] = ...) -> None: ...
