"""How a watch survives broken streams: where to go on, whether to try again, and when."""

from __future__ import annotations

import time

from rollplex.core import errors
from rollplex.core.errors import InternalError, RollplexError, Unavailable
from rollplex_client.results import Event, Iteration, IterationHandle

STREAM_S = 300.0
"""Deadline of one stream. A coordinator that hangs is noticed after it; a healthy one is asked again, which loses nothing."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
GIVE_UP_S = 120.0
"""Time without any answer after which the watch raises Unavailable."""

_TRANSIENT = (errors.Unavailable, errors.DeadlineExceeded)


class WatchCursor:
    """The position of a watch in a run's event log. The caller opens streams after `sequence` and reports to it."""

    def __init__(self, after_sequence: int, give_up_s: float = GIVE_UP_S) -> None:
        self.sequence = after_sequence
        self._give_up_s = give_up_s
        self._failures = 0
        self._last_answer = time.monotonic()

    def accept(self, event: Event) -> bool:
        """Whether the event is new. Raises InternalError when events are missing before it."""
        self._failures = 0
        self._last_answer = time.monotonic()
        if event.sequence <= self.sequence:
            return False
        if event.sequence != self.sequence + 1:
            raise InternalError(f"event {event.sequence} came after {self.sequence}; events in between are lost",
                                reason="EVENT_GAP", after=self.sequence, got=event.sequence)
        self.sequence = event.sequence
        return True

    def backoff_s(self, error: RollplexError) -> float:
        """How long to wait before the next stream. Raises what it was given where trying again cannot help."""
        if isinstance(error, errors.DeadlineExceeded):
            self._last_answer = time.monotonic()
            return 0.0
        if not isinstance(error, _TRANSIENT):
            raise error
        silent_s = time.monotonic() - self._last_answer
        if silent_s > self._give_up_s:
            raise Unavailable(f"the coordinator has not answered for {silent_s:.0f} s: {error}",
                              reason=error.reason) from error
        self._failures += 1
        return min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), LONGEST_BACKOFF_S)

    def stream_ended(self) -> float:
        """The server closed the stream without an error (it drains): wait as after a failure."""
        return self.backoff_s(Unavailable("the coordinator closed the event stream"))


def ended_iteration(event: Event, handle: IterationHandle) -> Iteration | None:
    """The iteration of `handle`, if this event ends it."""
    body = event.body
    if isinstance(body, Iteration) and body.ended and (body.iteration, body.validation) == (
            handle.iteration, handle.validation):
        return body
    return None
