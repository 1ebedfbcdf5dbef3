"""A gRPC proxy that repeats, delays and stops what passes: a network at its worst, between a caller and one service."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc import aio

from rollplex.rpc.channel import OPTIONS

STREAMS = ("WatchCommand", "WatchRun")
LONGEST_DELAY_S = 0.15


class RpcProxy:
    """Serves `address` and calls `target`, both `unix:/path`. `close` ends it.

    Until it is told otherwise everything passes as it is.
    """

    def __init__(self, address: str, target: str) -> None:
        self.address, self._target = address, target
        self.behave()
        self.seen: Counter[str] = Counter()
        """Calls by method."""
        self.repeated: Counter[str] = Counter()
        """Copies that were sent beside them."""
        self.refused: Counter[str] = Counter()
        """Copies that the service answered with an error."""
        self._copies: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start())

    def _call(self, coroutine, timeout_s: float = 30.0):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._channel = aio.insecure_channel(self._target, options=OPTIONS)
        await self._serve()

    async def _serve(self) -> None:
        Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        self._server = aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self._server.add_insecure_port(self.address)
        await self._server.start()

    def behave(self, repeats: Callable[[str], bool] = lambda method: False, *, late: bool = True, seed: int = 0) -> None:
        """Every unary call whose method (`StartGenerate`) is accepted is sent twice. `late`: its copy comes at any later time,
        after other calls, and its answer is nobody's; else the copy comes first, its answer is lost, and the call is repeated."""
        self._random, self._repeats, self._late = random.Random(seed), repeats, late

    def pause(self) -> None:
        """Nothing passes until `resume`; connections stay."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Breaks every connection; new ones are taken."""
        async def again() -> None:
            await self._server.stop(0)
            await self._serve()

        self._call(again())

    def close(self) -> None:
        async def end() -> None:
            self._open.set()
            for copy in self._copies:
                copy.cancel()
            await self._server.stop(0)
            await self._channel.close()

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # On the loop

    async def unary(self, method: str, request: bytes, context: aio.ServicerContext) -> bytes:
        await self._open.wait()
        name, left = method.rpartition("/")[2], context.time_remaining()
        self.seen[name] += 1
        call = self._channel.unary_unary(method)
        if self._repeats(name):
            self.repeated[name] += 1
            if self._late:
                self._copies.add(copy := asyncio.create_task(self._copy(name, call, request, left)))
                copy.add_done_callback(self._copies.discard)
            else:
                # The first answer is lost.
                await self._copy(name, call, request, left, 0.0)
        return await _forward(call(request, timeout=left, metadata=context.invocation_metadata()), context)

    async def _copy(self, name: str, call, request: bytes, timeout_s: float | None, delay_s: float | None = None) -> None:
        await asyncio.sleep(self._random.uniform(0, LONGEST_DELAY_S) if delay_s is None else delay_s)
        try:
            await call(request, timeout=timeout_s)
        except grpc.RpcError:
            self.refused[name] += 1

    async def stream(self, method: str, request: bytes, context: aio.ServicerContext):
        await self._open.wait()
        self.seen[method.rpartition("/")[2]] += 1
        call = self._channel.unary_stream(method)(request, timeout=context.time_remaining())
        try:
            async for message in call:
                await self._open.wait()
                yield message
        except grpc.RpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        finally:
            call.cancel()


async def _forward(call, context: aio.ServicerContext) -> bytes:
    try:
        return await call
    except grpc.RpcError as error:
        await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        raise AssertionError("abort raises") from error


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, proxy: RpcProxy) -> None:
        self._proxy = proxy

    def service(self, details):
        method = details.method
        if method.rpartition("/")[2] in STREAMS:
            async def stream(request, context):
                async for message in self._proxy.stream(method, request, context):
                    yield message

            return grpc.unary_stream_rpc_method_handler(stream)

        async def unary(request, context):
            return await self._proxy.unary(method, request, context)

        return grpc.unary_unary_rpc_method_handler(unary)
