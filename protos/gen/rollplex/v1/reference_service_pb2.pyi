from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartReferencePrefixRequest(_message.Message):
    __slots__ = ("header", "groups")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.PreparedGroup]
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.PreparedGroup, _Mapping]]] = ...) -> None: ...

class StartScoreSuffixRequest(_message.Message):
    __slots__ = ("header", "groups", "temperature", "keep_boundaries")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    KEEP_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    groups: _containers.RepeatedCompositeFieldContainer[ResponseGroup]
    temperature: float
    keep_boundaries: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[ResponseGroup, _Mapping]]] = ..., temperature: _Optional[float] = ..., keep_boundaries: bool = ...) -> None: ...

class ResponseGroup(_message.Message):
    __slots__ = ("group_index", "samples")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    samples: _containers.RepeatedCompositeFieldContainer[ResponseSample]
    def __init__(self, group_index: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[ResponseSample, _Mapping]]] = ...) -> None: ...

class ResponseSample(_message.Message):
    __slots__ = ("sample_index", "token_ids", "rollout_logprobs", "reference_logprobs", "old_logprobs", "advantage", "scored")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: _types_pb2.NumericArray
    rollout_logprobs: _types_pb2.NumericArray
    reference_logprobs: _types_pb2.NumericArray
    old_logprobs: _types_pb2.NumericArray
    advantage: float
    scored: bool
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., rollout_logprobs: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., reference_logprobs: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., old_logprobs: _Optional[_Union[_types_pb2.NumericArray, _Mapping]] = ..., advantage: _Optional[float] = ..., scored: bool = ...) -> None: ...
