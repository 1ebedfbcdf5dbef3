"""A Python function as a reward: called as its signature wants it, off the event loop, its failures told as errors."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rollplex.core.errors import BadInput, InternalError
from rollplex.v1.reward_service_pb2 import Score, ScoreRequest
from rollplex_client._reward_arguments import trl_arguments, verl_arguments
from rollplex_client._reward_scores import add_parts, batch_scores, sample_score
from rollplex_client._reward_signature import name_of, signature_of
from rollplex_client._reward_threads import DaemonThreads

log = logging.getLogger(__name__)

# Status messages travel in HTTP/2 headers, of which gRPC admits 8 KiB.
MAX_ERROR_CHARACTERS = 300

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class RewardFunction:
    """Scores requests with `fn`. Raises TypeError for another signature, BadInput for a bad name or limit."""

    def __init__(self, fn: Callable[..., Any], *, name: str | None = None, max_batch_size: int = 0,
                 threads: int = 8) -> None:
        self.signature = signature_of(fn)
        self.name = name or name_of(fn)
        if not _NAME.fullmatch(self.name):
            raise BadInput(f"reward name {self.name!r} must be letters, digits, '_', '.' or '-', because metrics are "
                           "named after it; give name=", reason="BAD_REWARD_NAME")
        if max_batch_size < 0 or threads < 1:
            raise BadInput(f"max_batch_size is {max_batch_size} and threads is {threads}; the least are 0 and 1")
        self.max_batch_size = max_batch_size
        self._fn = fn
        self._threads = DaemonThreads(threads)

    async def score(self, request: ScoreRequest) -> list[Score]:
        """One score an item, in order.

        Raises BadInput for a request that is wrong as a whole, InternalError when a batch (TRL) function raised.
        """
        count = len(request.items)
        if count == 0:
            raise BadInput("a Score request needs at least one item", reason="NO_ITEMS")
        if 0 < self.max_batch_size < count:
            raise BadInput(f"{count} items are more than the {self.max_batch_size} that reward {self.name} takes at "
                           "once", reason="BATCH_TOO_LARGE", items=count, max_batch_size=self.max_batch_size)
        if self.signature.kind == "trl":
            return await self._score_batch(request)
        arguments = [verl_arguments(item, index) for index, item in enumerate(request.items)]
        return list(await asyncio.gather(*map(self._score_sample, arguments)))

    async def _score_batch(self, request: ScoreRequest) -> list[Score]:
        notes = _Notes(len(request.items))
        arguments = trl_arguments(request, notes.log_extra, notes.log_metric)
        missing = [name for name in self.signature.required if name not in arguments]
        if missing:
            raise BadInput(f"reward {self.name} needs the column(s) {', '.join(missing)}; the rows have "
                           f"{', '.join(sorted(arguments))}", reason="COLUMN_MISSING", columns=",".join(missing))
        try:
            returned = await self._call(arguments)
        except Exception as error:
            raise InternalError(self._describe(error), reason="REWARD_RAISED", reward=self.name) from error
        scores = batch_scores(returned, len(request.items))
        add_parts(scores, notes.parts)
        return scores

    async def _score_sample(self, arguments: dict[str, Any]) -> Score:
        try:
            return sample_score(await self._call(arguments))
        except Exception as error:  # noqa: BLE001 - anything may be wrong in the user's function; the sample says what
            log.warning("%s", self._describe(error), exc_info=error)
            return Score(error=self._describe(error))

    async def _call(self, arguments: dict[str, Any]) -> Any:
        selected = self.signature.select(arguments)
        if self.signature.is_async:
            return await self._fn(**selected)
        returned = await self._threads.run(self._fn, **selected)
        return await returned if inspect.isawaitable(returned) else returned

    def _describe(self, error: Exception) -> str:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"reward function {self.name} raised {type(error).__name__}: {error}"
        return f"{text[:MAX_ERROR_CHARACTERS]} ({frame.filename}:{frame.lineno})"


class _Notes:
    """TRL's `log_extra` (a list, one entry a sample) and `log_metric` (one number): both become parts of the scores."""

    def __init__(self, count: int) -> None:
        self.parts: list[dict[str, Any]] = [{} for _ in range(count)]

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Raises ValueError when there is not one value a sample. Only numbers among them become parts."""
        for parts, value in zip(self.parts, values, strict=True):
            parts[column] = value

    def log_metric(self, name: str, value: float) -> None:
        for parts in self.parts:
            parts[name] = value
