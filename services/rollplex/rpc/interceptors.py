"""What every call to a Rollplex server passes through: a deadline is demanded, errors become rich statuses, drain refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from rollplex.core.errors import BadInput, Forbidden, InternalError, Unavailable, as_domain_error
from rollplex.rpc.credentials import Token
from rollplex.rpc.status import DETAILS_KEY, code_of, rich_status

log = logging.getLogger(__name__)

_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
"""Standard tools call these without a deadline, and while a server drains."""


class Gate(aio.ServerInterceptor):
    """Wraps every handler. `loading` until the service is ready, `draining` once it has begun to stop."""

    def __init__(self, token: Token | None = None) -> None:
        """`token`: what every call must carry, health and reflection included; None on Unix sockets."""
        self._token = token
        self.loading = True
        self.draining = False

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        if self._token is not None and not self._token.accepts(details.invocation_metadata):
            # Before any message is read: a stranger's request is not even parsed.
            return grpc.stream_stream_rpc_method_handler(_refuse_stranger)
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, details.method),
                handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, details.method),
                handler.request_deserializer, handler.response_serializer)
        raise InternalError(f"{details.method}: client streams are not part of Rollplex's protos")

    def _admit(self, context: aio.ServicerContext) -> None:
        if self.draining:
            raise Unavailable("the service is draining", reason="DRAINING")
        if self.loading:
            raise Unavailable("the service is loading", reason="LOADING")
        if context.time_remaining() is None:
            raise BadInput("every call to Rollplex needs a deadline", reason="DEADLINE_REQUIRED")

    def _unary(self, call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def handle(request: Any, context: aio.ServicerContext) -> Any:
            try:
                self._admit(context)
                return await call(request, context)
            except (aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the one place where errors become statuses
                await _abort(context, error, method)

        return handle

    def _stream(self, call: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
        async def handle(request: Any, context: aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                self._admit(context)
                async for response in call(request, context):
                    yield response
            except (aio.AbortError, asyncio.CancelledError, GeneratorExit):
                raise
            except Exception as error:  # noqa: BLE001 - as above
                await _abort(context, error, method)

        return handle


async def _refuse_stranger(request: Any, context: aio.ServicerContext) -> None:
    await _abort(context, Forbidden("the call carries no token of this mesh (mesh.token_file, ROLLPLEX_TOKEN_FILE)",
                                    reason="TOKEN_REFUSED"), "a call by TCP")


async def _abort(context: aio.ServicerContext, error: Exception, method: str) -> None:
    domain_error = as_domain_error(error)
    if isinstance(domain_error, InternalError):
        log.exception("%s failed", method, exc_info=error)
    else:
        log.info("%s refused: %s: %s", method, domain_error.reason, domain_error)
    details = ((DETAILS_KEY, rich_status(domain_error).SerializeToString()),)
    await context.abort(code_of(domain_error), str(domain_error), details)
