"""Watches over the other ranks of an NCCL group: their death or leave ends this rank's collectives.

Over gloo a dead process closes its sockets, and what waits for it raises. A kernel of NCCL spins for a lost peer until the
group's deadline, and the host with it, in a call that nothing interrupts; aborting the group ends the kernel.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_PERIOD_MS = 200
"""Of looking for a note; a death is seen at once."""


class PeerWatch:
    """One epoch's, on a thread of its own, from construction to `close`."""

    def __init__(self, pidfds: Mapping[int, int], left: Callable[[int], str], abort: Callable[[], None]) -> None:
        """`pidfds`: of the other ranks, by rank, open until `close`. `left`: what a rank said that left, else nothing.
        `abort`: called once, when the first of them is gone."""
        self._ranks = {pidfd: rank for rank, pidfd in pidfds.items()}
        self._left, self._abort = left, abort
        self._ended = threading.Event()
        self.lost = False
        """Somebody is gone, and the group has been aborted."""
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent; afterwards nothing is aborted any more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        poller = select.poll()
        for pidfd in self._ranks:
            poller.register(pidfd, select.POLLIN)
        while not self._ended.is_set():
            gone = [self._ranks[pidfd] for pidfd, _ in poller.poll(_PERIOD_MS)]
            gone += [rank for rank in self._ranks.values() if self._left(rank)]
            if gone and not self._ended.is_set():
                log.warning("rank %d is gone; this rank's collectives end", gone[0])
                self.lost = True
                self._abort()
                return
