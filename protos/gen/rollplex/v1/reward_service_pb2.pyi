from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("run", "iteration", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    iteration: int
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, run: _Optional[str] = ..., iteration: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("group_index", "sample_index", "messages_json", "response_text", "response_token_ids", "ground_truth", "problem_type", "data_source", "columns_json")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEXT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_JSON_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    sample_index: int
    messages_json: str
    response_text: str
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ground_truth: str
    problem_type: str
    data_source: str
    columns_json: str
    def __init__(self, group_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., messages_json: _Optional[str] = ..., response_text: _Optional[str] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., ground_truth: _Optional[str] = ..., problem_type: _Optional[str] = ..., data_source: _Optional[str] = ..., columns_json: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("value", "error", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    value: float
    error: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, value: _Optional[float] = ..., error: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DescribeRewardRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRewardResponse(_message.Message):
    __slots__ = ("name", "max_batch_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_batch_size: int
    def __init__(self, name: _Optional[str] = ..., max_batch_size: _Optional[int] = ...) -> None: ...
