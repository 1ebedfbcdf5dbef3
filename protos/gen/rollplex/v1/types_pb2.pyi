import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_UNSPECIFIED: _ClassVar[Residency]
    RESIDENCY_HBM: _ClassVar[Residency]
    RESIDENCY_PINNED: _ClassVar[Residency]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_IDLE: _ClassVar[Phase]
    PHASE_OVERLAP: _ClassVar[Phase]
    PHASE_SUFFIX: _ClassVar[Phase]
    PHASE_UPDATE: _ClassVar[Phase]
RESIDENCY_UNSPECIFIED: Residency
RESIDENCY_HBM: Residency
RESIDENCY_PINNED: Residency
PHASE_UNSPECIFIED: Phase
PHASE_IDLE: Phase
PHASE_OVERLAP: Phase
PHASE_SUFFIX: Phase
PHASE_UPDATE: Phase

class NumericArray(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("slab", "offset_bytes", "shape", "strides", "dtype")
    SLAB_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    slab: str
    offset_bytes: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, slab: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("kind", "frames", "fps", "sha256")
    KIND_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    kind: str
    frames: Placement
    fps: float
    sha256: str
    def __init__(self, kind: _Optional[str] = ..., frames: _Optional[_Union[Placement, _Mapping]] = ..., fps: _Optional[float] = ..., sha256: _Optional[str] = ...) -> None: ...

class PreparedGroup(_message.Message):
    __slots__ = ("group_index", "token_ids", "media", "prompt_hash", "sample_count", "prompt_ordinal")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    token_ids: NumericArray
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    prompt_hash: str
    sample_count: int
    prompt_ordinal: int
    def __init__(self, group_index: _Optional[int] = ..., token_ids: _Optional[_Union[NumericArray, _Mapping]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., prompt_hash: _Optional[str] = ..., sample_count: _Optional[int] = ..., prompt_ordinal: _Optional[int] = ...) -> None: ...

class CommandHeader(_message.Message):
    __slots__ = ("command_id", "epoch", "sequence", "run", "iteration", "snapshot", "timeout")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    epoch: int
    sequence: int
    run: str
    iteration: int
    snapshot: int
    timeout: _duration_pb2.Duration
    def __init__(self, command_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., run: _Optional[str] = ..., iteration: _Optional[int] = ..., snapshot: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ("command_id", "replayed")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    replayed: bool
    def __init__(self, command_id: _Optional[str] = ..., replayed: bool = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ResidencyEntry(_message.Message):
    __slots__ = ("object_class", "role", "device", "residency", "size_bytes", "peak_bytes")
    OBJECT_CLASS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    object_class: str
    role: str
    device: str
    residency: Residency
    size_bytes: int
    peak_bytes: int
    def __init__(self, object_class: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., residency: _Optional[_Union[Residency, str]] = ..., size_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ...) -> None: ...
