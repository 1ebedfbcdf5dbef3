from rollplex.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartGenerateRequest(_message.Message):
    __slots__ = ("header", "groups", "sampling")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.CommandHeader
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.PreparedGroup]
    sampling: Sampling
    def __init__(self, header: _Optional[_Union[_types_pb2.CommandHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.PreparedGroup, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "max_response_tokens", "greedy", "seed", "deterministic", "length_distribution")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    LENGTH_DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_response_tokens: int
    greedy: bool
    seed: int
    deterministic: bool
    length_distribution: str
    def __init__(self, temperature: _Optional[float] = ..., max_response_tokens: _Optional[int] = ..., greedy: bool = ..., seed: _Optional[int] = ..., deterministic: bool = ..., length_distribution: _Optional[str] = ...) -> None: ...
