"""The client for asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Concatenate, ParamSpec, TypeVar

import grpc

from rollplex.rpc.channel import aio_channel
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from rollplex_client import calls, parsing
from rollplex_client.calls import Call
from rollplex_client.results import Event, Iteration, IterationHandle
from rollplex_client.watching import GIVE_UP_S, STREAM_S, WatchCursor, ended_iteration

P = ParamSpec("P")
R = TypeVar("R")


def _method(build: Callable[P, Call[R]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[R]]:
    @functools.wraps(build)
    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._send(build(*args, **kwargs))

    return method


class AsyncClient:
    """`Client` for one event loop: the same methods, awaited. Build it inside the loop."""

    def __init__(self, address: str, *, wait_for_ready: bool = False) -> None:
        """As `Client`."""
        self.address = address
        self._channel = aio_channel(address)
        self._stub = CoordinatorServiceStub(self._channel)
        self._wait_for_ready = wait_for_ready

    create_run = _method(calls.create_run)
    get_run = _method(calls.get_run)
    list_runs = _method(calls.list_runs)
    submit_iteration = _method(calls.submit_iteration)
    replay_iteration = _method(calls.replay_iteration)
    submit_validation = _method(calls.submit_validation)
    get_iteration = _method(calls.get_iteration)
    cancel = _method(calls.cancel)
    list_samples = _method(calls.list_samples)
    register_reward = _method(calls.register_reward)
    unregister_reward = _method(calls.unregister_reward)
    list_rewards = _method(calls.list_rewards)
    export_checkpoint = _method(calls.export_checkpoint)
    durable_checkpoint = _method(calls.durable_checkpoint)
    mesh = _method(calls.mesh)

    async def watch(self, run: str, after_sequence: int = 0, *, stream_s: float = STREAM_S,
                    give_up_s: float = GIVE_UP_S) -> AsyncIterator[Event]:
        """As `Client.watch`."""
        cursor = WatchCursor(after_sequence, give_up_s)
        while True:
            stream = self._stub.WatchRun(pb.WatchRunRequest(run=run, after_sequence=cursor.sequence), timeout=stream_s)
            try:
                async for message in stream:
                    event = parsing.event(message)
                    if cursor.accept(event):
                        yield event
                pause_s = cursor.stream_ended()
            except grpc.RpcError as error:
                pause_s = cursor.backoff_s(error_from_rpc(error))
            finally:
                stream.cancel()
            await asyncio.sleep(pause_s)

    async def wait(self, handle: IterationHandle, *, on_event: Callable[[Event], None] | None = None,
                   give_up_s: float = GIVE_UP_S) -> Iteration:
        """As `Client.wait`."""
        async with aclosing(self.watch(handle.run, handle.after_sequence, give_up_s=give_up_s)) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event)
                if ended := ended_iteration(event, handle):
                    if ended.error is not None:
                        raise ended.error
                    return ended
        raise AssertionError("a watch has no end")

    async def _send(self, call: Call[R]) -> R:
        try:
            answer = await getattr(self._stub, call.method)(call.request, timeout=call.timeout_s,
                                                            wait_for_ready=self._wait_for_ready)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return call.parse(answer)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
