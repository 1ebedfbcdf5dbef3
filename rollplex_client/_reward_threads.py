"""Threads for functions that block. Daemons: one that never returns must not keep the process from exiting."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class DaemonThreads:
    """Runs functions in at most `limit` threads; a thread counts until its function has returned, awaited or not."""

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, fn: Callable[..., Any], **arguments: Any) -> Any:
        """What `fn` returns or raises. Cancelling frees the caller; the function itself cannot be stopped."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def finish(result: Any, error: BaseException | None) -> None:
            self._free.release()
            if not outcome.done():
                outcome.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(fn, **arguments)
            except BaseException as raised:  # noqa: BLE001 - it is raised again where the result is awaited
                error = raised
            # The loop is closed when the server has stopped in the meantime: nobody waits then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=work, daemon=True, name="reward-function").start()
        result, error = await outcome
        if error is None:
            return result
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"the function tried to end its process: {error!r}") from error
