"""The end of a process that can do nothing more: its device refuses everything, or part of its memory is gone.

The supervisor starts another one, which takes up the slabs; the error of the command is told first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from rollplex.core.errors import RollplexError

log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""EX_SOFTWARE; the supervisor starts the engine again whatever it is."""
FATAL_REASONS = frozenset({"DEVICE_FAULT", "KV_NOT_BACKED"})
"""After these only a new process works."""
TELL_S = 2.0
"""For those who watch the failed command."""


def end_process() -> None:
    # Not by SIGTERM: draining would wait for kernels that never end. Slabs are the broker's, and its leases end with us.
    os._exit(EXIT_STATUS)


def end_when_fatal(error: RollplexError, *, end: Callable[[], None] = end_process, tell_s: float = TELL_S) -> None:
    """Any thread: after a fatal error, `end` is called in a moment, on a thread of its own."""
    if error.reason not in FATAL_REASONS:
        return
    log.critical("%s: this process must be replaced, and ends: %s", error.reason, error)
    timer = threading.Timer(tell_s, end)
    timer.daemon = True
    timer.start()
