from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_MODE_UNSPECIFIED: _ClassVar[LeaseMode]
    LEASE_MODE_READ: _ClassVar[LeaseMode]
    LEASE_MODE_WRITE: _ClassVar[LeaseMode]

class SnapshotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_STATE_UNSPECIFIED: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_VALID: _ClassVar[SnapshotState]
    SNAPSHOT_STATE_TORN: _ClassVar[SnapshotState]
LEASE_MODE_UNSPECIFIED: LeaseMode
LEASE_MODE_READ: LeaseMode
LEASE_MODE_WRITE: LeaseMode
SNAPSHOT_STATE_UNSPECIFIED: SnapshotState
SNAPSHOT_STATE_VALID: SnapshotState
SNAPSHOT_STATE_TORN: SnapshotState

class Slab(_message.Message):
    __slots__ = ("name", "object_class", "role", "device", "size_bytes", "generation", "inode", "run")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBJECT_CLASS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    name: str
    object_class: str
    role: str
    device: str
    size_bytes: int
    generation: int
    inode: int
    run: str
    def __init__(self, name: _Optional[str] = ..., object_class: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., size_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., inode: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class CreateSlabRequest(_message.Message):
    __slots__ = ("session", "slab")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    session: str
    slab: Slab
    def __init__(self, session: _Optional[str] = ..., slab: _Optional[_Union[Slab, _Mapping]] = ...) -> None: ...

class CreateSlabResponse(_message.Message):
    __slots__ = ("deposit_ticket",)
    DEPOSIT_TICKET_FIELD_NUMBER: _ClassVar[int]
    deposit_ticket: str
    def __init__(self, deposit_ticket: _Optional[str] = ...) -> None: ...

class ListSlabsRequest(_message.Message):
    __slots__ = ("name_prefix",)
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    name_prefix: str
    def __init__(self, name_prefix: _Optional[str] = ...) -> None: ...

class ListSlabsResponse(_message.Message):
    __slots__ = ("slabs",)
    SLABS_FIELD_NUMBER: _ClassVar[int]
    slabs: _containers.RepeatedCompositeFieldContainer[Slab]
    def __init__(self, slabs: _Optional[_Iterable[_Union[Slab, _Mapping]]] = ...) -> None: ...

class DeleteSlabRequest(_message.Message):
    __slots__ = ("session", "name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session: str
    name: str
    def __init__(self, session: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DeleteSlabResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("session", "slab", "mode", "snapshot", "update_epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: str
    slab: str
    mode: LeaseMode
    snapshot: int
    update_epoch: int
    def __init__(self, session: _Optional[str] = ..., slab: _Optional[str] = ..., mode: _Optional[_Union[LeaseMode, str]] = ..., snapshot: _Optional[int] = ..., update_epoch: _Optional[int] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("lease_id", "ticket", "slab")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ticket: str
    slab: Slab
    def __init__(self, lease_id: _Optional[str] = ..., ticket: _Optional[str] = ..., slab: _Optional[_Union[Slab, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("session", "lease_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    lease_id: str
    def __init__(self, session: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteRange(_message.Message):
    __slots__ = ("session", "slab", "start_bytes", "end_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    START_BYTES_FIELD_NUMBER: _ClassVar[int]
    END_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: str
    slab: str
    start_bytes: int
    end_bytes: int
    def __init__(self, session: _Optional[str] = ..., slab: _Optional[str] = ..., start_bytes: _Optional[int] = ..., end_bytes: _Optional[int] = ...) -> None: ...

class RegisterSnapshotRequest(_message.Message):
    __slots__ = ("run", "slabs", "snapshot")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    slabs: _containers.RepeatedScalarFieldContainer[str]
    snapshot: int
    def __init__(self, run: _Optional[str] = ..., slabs: _Optional[_Iterable[str]] = ..., snapshot: _Optional[int] = ...) -> None: ...

class RegisterSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginUpdateRequest(_message.Message):
    __slots__ = ("run", "snapshot", "writers")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    snapshot: int
    writers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., snapshot: _Optional[int] = ..., writers: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("update_epoch",)
    UPDATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    update_epoch: int
    def __init__(self, update_epoch: _Optional[int] = ...) -> None: ...

class PublishSnapshotRequest(_message.Message):
    __slots__ = ("run", "update_epoch", "snapshot")
    RUN_FIELD_NUMBER: _ClassVar[int]
    UPDATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    update_epoch: int
    snapshot: int
    def __init__(self, run: _Optional[str] = ..., update_epoch: _Optional[int] = ..., snapshot: _Optional[int] = ...) -> None: ...

class PublishSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("state", "snapshot", "update_epoch", "slabs")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    state: SnapshotState
    snapshot: int
    update_epoch: int
    slabs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[SnapshotState, str]] = ..., snapshot: _Optional[int] = ..., update_epoch: _Optional[int] = ..., slabs: _Optional[_Iterable[str]] = ...) -> None: ...

class EnterPhaseRequest(_message.Message):
    __slots__ = ("run", "iteration", "phase", "planned", "relaxed", "caller", "sequence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    phase: _types_pb2.Phase
    planned: _containers.RepeatedCompositeFieldContainer[PlannedBytes]
    relaxed: _containers.RepeatedScalarFieldContainer[str]
    caller: str
    sequence: int
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., planned: _Optional[_Iterable[_Union[PlannedBytes, _Mapping]]] = ..., relaxed: _Optional[_Iterable[str]] = ..., caller: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class PlannedBytes(_message.Message):
    __slots__ = ("object_class", "device", "size_bytes")
    OBJECT_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    object_class: str
    device: str
    size_bytes: int
    def __init__(self, object_class: _Optional[str] = ..., device: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class EnterPhaseResponse(_message.Message):
    __slots__ = ("violations",)
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, violations: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportResidencyRequest(_message.Message):
    __slots__ = ("session", "entries")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    session: str
    entries: _containers.RepeatedCompositeFieldContainer[_types_pb2.ResidencyEntry]
    def __init__(self, session: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[_types_pb2.ResidencyEntry, _Mapping]]] = ...) -> None: ...

class ReportResidencyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("rows", "peaks", "host_limit_bytes", "host_slab_bytes", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    HOST_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[LedgerRow]
    peaks: _containers.RepeatedCompositeFieldContainer[LedgerRow]
    host_limit_bytes: int
    host_slab_bytes: int
    counts: _containers.ScalarMap[str, int]
    def __init__(self, rows: _Optional[_Iterable[_Union[LedgerRow, _Mapping]]] = ..., peaks: _Optional[_Iterable[_Union[LedgerRow, _Mapping]]] = ..., host_limit_bytes: _Optional[int] = ..., host_slab_bytes: _Optional[int] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LedgerRow(_message.Message):
    __slots__ = ("object_class", "role", "device", "phase", "size_bytes", "slab_count", "residency")
    OBJECT_CLASS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    object_class: str
    role: str
    device: str
    phase: _types_pb2.Phase
    size_bytes: int
    slab_count: int
    residency: _types_pb2.Residency
    def __init__(self, object_class: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., size_bytes: _Optional[int] = ..., slab_count: _Optional[int] = ..., residency: _Optional[_Union[_types_pb2.Residency, str]] = ...) -> None: ...
