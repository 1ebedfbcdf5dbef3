"""A BrokerSession without a broker: slabs in a dict, leases recorded, everything granted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.memory.slab import Slab


@dataclass(eq=False)
class FakeLease:
    slab: Slab
    mode: LeaseMode
    fd: int
    expected: dict
    session: FakeSession
    lost: bool = False

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.session.leases.remove(self)

    def __enter__(self) -> FakeLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass
class FakeSession:
    slabs: dict[str, tuple[Slab, int]] = field(default_factory=dict)
    leases: list[FakeLease] = field(default_factory=list)
    snapshot: int = 0

    def add(self, name: str, fd: int, size_bytes: int, device: str = "host:0") -> None:
        kept = os.dup(fd)
        slab = Slab(name, "media", "coordinator", device, size_bytes, inode=os.fstat(kept).st_ino)
        self.slabs[name] = slab, kept

    def lease(self, name: str, mode: LeaseMode, **expected: int | None) -> FakeLease:
        if expected.get("snapshot", self.snapshot) != self.snapshot:
            raise WrongState("another snapshot", reason="STALE_SNAPSHOT")
        slab, fd = self.slabs[name]
        lease = FakeLease(slab, mode, os.dup(fd), expected, self)
        self.leases.append(lease)
        return lease

    def close(self) -> None:
        for _, fd in self.slabs.values():
            os.close(fd)
