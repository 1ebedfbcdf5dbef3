"""DescribeService: what this process was built and configured with, served by all and asked by who must agree with it."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from grpc import aio

import rollplex.v1
from rollplex.core.compatibility import PROTOS, Description, Facts, digest
from rollplex.core.errors import WrongState
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import describe_service_pb2 as pb
from rollplex.v1 import describe_service_pb2_grpc as pb_grpc

Field = descriptor_pb2.FieldDescriptorProto


@functools.cache
def proto_facts() -> dict[str, str]:
    """Fields, enum values and methods of every proto of ours, as this process was generated with."""
    facts: dict[str, str] = {}
    for module in sorted(item.name for item in pkgutil.iter_modules(rollplex.v1.__path__) if item.name.endswith("_pb2")):
        file = descriptor_pb2.FileDescriptorProto()
        importlib.import_module(f"rollplex.v1.{module}").DESCRIPTOR.CopyToProto(file)
        facts.update(_of_file(file))
    return facts


def _of_file(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for message in file.message_type:
        yield from _of_message(f"{file.package}.{message.name}", message)
    for enum in file.enum_type:
        yield from ((f"{file.package}.{enum.name}.{value.name}", str(value.number)) for value in enum.value)
    for service in file.service:
        for method in service.method:
            streams = "stream " if method.server_streaming else ""
            yield (f"{file.package}.{service.name}.{method.name}",
                   f"{method.input_type.lstrip('.')} -> {streams}{method.output_type.lstrip('.')}")


def _of_message(name: str, message: descriptor_pb2.DescriptorProto) -> Iterator[tuple[str, str]]:
    for field in message.field:
        kind = field.type_name.lstrip(".") or Field.Type.Name(field.type).removeprefix("TYPE_").lower()
        repeated = "repeated " if field.label == Field.LABEL_REPEATED else ""
        where = "optional " if field.proto3_optional else ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            where = f"oneof {message.oneof_decl[field.oneof_index].name}: "
        yield f"{name}.{field.name}", f"{where}{repeated}{kind} = {field.number}"
    for nested in message.nested_type:
        yield from _of_message(f"{name}.{nested.name}", nested)
    for enum in message.enum_type:
        yield from ((f"{name}.{enum.name}.{value.name}", str(value.number)) for value in enum.value)


class DescribeServicer(pb_grpc.DescribeServiceServicer):
    """`subjects`: beside the protos, which every service has."""

    def __init__(self, name: str, subjects: Mapping[str, Facts]) -> None:
        self._name = name
        self._subjects = {subject: dict(facts) for subject, facts in {PROTOS: proto_facts(), **subjects}.items() if facts}

    async def Describe(self, request: pb.DescribeRequest, context: aio.ServicerContext) -> pb.DescribeResponse:
        return pb.DescribeResponse(name=self._name, pid=os.getpid(), subjects={
            subject: pb.Subject(digest=digest(facts), facts=facts if request.with_facts else {})
            for subject, facts in self._subjects.items()})


def own_description(name: str, subjects: Mapping[str, Facts]) -> Description:
    """This process's own, with its facts."""
    whole = {PROTOS: proto_facts(), **subjects}
    return Description(name, os.getpid(), {subject: digest(facts) for subject, facts in whole.items()}, whole)


async def describe(name: str, channel: aio.Channel, timeout_s: float, *, with_facts: bool = False) -> Description:
    """Asks a service. Raises WrongState for one that cannot say, whose code is older than this question, and as the call."""
    try:
        answer = await _stub(channel).Describe(pb.DescribeRequest(with_facts=with_facts), timeout=timeout_s, wait_for_ready=True)
    except grpc.RpcError as error:
        raise _refused(name, error) from error
    return _read(name, answer)


def describe_sync(name: str, channel: grpc.Channel, timeout_s: float) -> Description:
    """As `describe`, with facts, for threads."""
    try:
        answer = _stub(channel).Describe(pb.DescribeRequest(with_facts=True), timeout=timeout_s)
    except grpc.RpcError as error:
        raise _refused(name, error) from error
    return _read(name, answer)


def _stub(channel: Any) -> Any:
    return pb_grpc.DescribeServiceStub(channel)


def _refused(name: str, error: grpc.RpcError) -> Exception:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return WrongState(f"{name} does not say what it was built with: it runs code from before DescribeService; restart it",
                          reason="PROTO_MISMATCH", service=name)
    return error_from_rpc(error)


def _read(name: str, answer: pb.DescribeResponse) -> Description:
    return Description(name, answer.pid, {subject: found.digest for subject, found in answer.subjects.items()},
                       {subject: dict(found.facts) for subject, found in answer.subjects.items()})
