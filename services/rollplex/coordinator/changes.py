"""Changes of state that nobody leaves half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Each in a task of its own: a client that goes away, or whose deadline passes, does not end it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def make(self, change: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """All that are under way have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
