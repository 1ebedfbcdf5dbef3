"""Domain errors <-> google.rpc.Status with ErrorInfo(reason, domain "rollplex")."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rollplex.core import errors
from rollplex.v1 import types_pb2

DOMAIN = "rollplex"
DETAILS_KEY = "grpc-status-details-bin"

CODES: dict[type[errors.RollplexError], grpc.StatusCode] = {
    errors.BadInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
KINDS = {code: kind for kind, code in CODES.items()} | {grpc.StatusCode.CANCELLED: errors.Unavailable}
"""A call that its server cancelled is one of a process that drains: what we cancel ourselves is no RpcError."""


def code_of(error: errors.RollplexError) -> grpc.StatusCode:
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def rich_status(error: errors.RollplexError) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=code_of(error).value[0], message=str(error), details=[detail])


def error_from_rpc(error: grpc.RpcError) -> errors.RollplexError:
    """The domain error behind a failed call; the kind by its code, reason and metadata where the server sent them."""
    kind = KINDS.get(error.code(), errors.InternalError)
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return kind(error.details() or "", reason=info.reason, **dict(info.metadata))
    return kind(error.details() or str(error.code()))


def to_detail(error: errors.RollplexError) -> types_pb2.ErrorDetail:
    """For streams, where the status of the call cannot carry the error."""
    return types_pb2.ErrorDetail(code=code_of(error).value[0], reason=error.reason, message=str(error),
                                 metadata=error.metadata)


def from_detail(detail: types_pb2.ErrorDetail) -> errors.RollplexError:
    code = next((code for code in KINDS if code.value[0] == detail.code), grpc.StatusCode.INTERNAL)
    return KINDS[code](detail.message, reason=detail.reason, **dict(detail.metadata))
