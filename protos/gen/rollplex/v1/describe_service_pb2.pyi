from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("with_facts",)
    WITH_FACTS_FIELD_NUMBER: _ClassVar[int]
    with_facts: bool
    def __init__(self, with_facts: bool = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("name", "pid", "subjects")
    class SubjectsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Subject
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Subject, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    subjects: _containers.MessageMap[str, Subject]
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., subjects: _Optional[_Mapping[str, Subject]] = ...) -> None: ...

class Subject(_message.Message):
    __slots__ = ("digest", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, digest: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
