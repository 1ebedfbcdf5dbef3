"""Waiting for a process that need not be a child: `os.pidfd_open` makes the descriptor."""

from __future__ import annotations

import select


def ended_within(descriptor: int, timeout_s: float) -> bool:
    """Whether the process of a pidfd has ended, or ends within `timeout_s`. Unlike select, of any number."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
