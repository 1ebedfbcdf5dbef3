"""A lease as its holder sees it."""

from __future__ import annotations

import os
from collections.abc import Callable

from rollplex.core.leases import LeaseMode
from rollplex.memory.slab import Slab


class SlabLease:
    """The right to map a slab, until `release`. Unmap before."""

    def __init__(self, lease_id: str, mode: LeaseMode, slab: Slab, fd: int,
                 give_back: Callable[[SlabLease], None]) -> None:
        self.lease_id, self.mode, self.slab, self.fd = lease_id, mode, slab, fd
        self.lost = False
        """The broker does not know it any more: unbind and lease again."""
        self._give_back = give_back

    def release(self) -> None:
        """Gives the right back and closes `fd`. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._give_back(self)

    def __enter__(self) -> SlabLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
