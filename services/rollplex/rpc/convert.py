"""Core dataclasses <-> protos, by field name. A dataclass and its message carry the same names; a test pairs them all."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from array import array
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message

from rollplex.v1 import types_pb2

T = TypeVar("T")

DTYPE_OF_TYPECODE = {"q": "int64", "i": "int32", "d": "float64", "f": "float32"}
TYPECODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_TYPECODE.items()}


def array_to_proto(values: array) -> types_pb2.NumericArray:
    """A one-dimensional array by value."""
    return types_pb2.NumericArray(dtype=DTYPE_OF_TYPECODE[values.typecode], shape=[len(values)], data=values.tobytes())


def array_from_proto(message: types_pb2.NumericArray) -> array:
    """Raises ValueError when dtype, shape and bytes do not agree."""
    code = TYPECODE_OF_DTYPE.get(message.dtype)
    if code is None:
        raise ValueError(f"array dtype {message.dtype!r} is none of {', '.join(TYPECODE_OF_DTYPE)}")
    values = array(code)
    count = 1
    for extent in message.shape:
        count *= extent
    if len(message.data) != count * values.itemsize:
        raise ValueError(f"{len(message.data)} bytes for {list(message.shape)} of {message.dtype}")
    values.frombytes(message.data)
    return values


def to_proto(value: Any, message: type[T]) -> T:
    """A dataclass as `message`; None leaves a field unset."""
    result = message()
    descriptors = message.DESCRIPTOR.fields_by_name
    for name in _names(type(value)):
        item = getattr(value, name)
        if item is None:
            continue
        descriptor = descriptors[name]
        enum = descriptor.enum_type
        if enum is not None:
            setattr(result, name, enum.values_by_name[_enum_prefix(enum.name) + str(item).upper()].number)
        elif isinstance(item, array):
            getattr(result, name).CopyFrom(array_to_proto(item))
        elif dataclasses.is_dataclass(item):
            getattr(result, name).CopyFrom(to_proto(item, _class_of(descriptor)))
        elif isinstance(item, dict):
            getattr(result, name).update(item)
        elif isinstance(item, tuple | list):
            if item and dataclasses.is_dataclass(item[0]):
                inner = _class_of(descriptor)
                item = [to_proto(element, inner) for element in item]
            getattr(result, name).extend(item)
        else:
            setattr(result, name, item)
    return result


def from_proto(cls: type[T], message: Message) -> T:
    """The dataclass of a message; an unset optional field is None."""
    descriptors = message.DESCRIPTOR.fields_by_name
    values = {}
    for name, hint in _hints(cls).items():
        descriptor = descriptors[name]
        if descriptor.has_presence and not message.HasField(name):
            if not _is_optional(hint):
                raise ValueError(f"{message.DESCRIPTOR.name}.{name} is not set")
            values[name] = None
            continue
        values[name] = _from_field(_inner(hint), getattr(message, name), descriptor)
    return cls(**values)


def _from_field(hint: Any, value: Any, descriptor: Any) -> Any:
    if descriptor.enum_type is not None:
        enum = descriptor.enum_type
        return enum.values_by_number[value].name.removeprefix(_enum_prefix(enum.name)).lower()
    if hint is array:
        return array_from_proto(value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        element = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(element):
            return tuple(from_proto(element, item) for item in value)
        return tuple(value)
    if origin is dict:
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return from_proto(hint, value)
    return value


def _enum_prefix(name: str) -> str:
    """SnapshotState -> SNAPSHOT_STATE_."""
    return "".join("_" + letter if letter.isupper() else letter for letter in name).lstrip("_").upper() + "_"


def _class_of(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor.message_type)


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(cls))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


def _inner(hint: Any) -> Any:
    if _is_optional(hint):
        return next(choice for choice in typing.get_args(hint) if choice is not type(None))
    return hint
