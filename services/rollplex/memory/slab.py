"""What the broker tells about its slabs, as plain data: the messages of memory_broker_service.proto without proto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slab:
    """One physical allocation in the broker's custody."""

    name: str
    object_class: str
    """A key of rollplex.core.residency.CONTRACT."""
    role: str
    """Of the process that created it."""
    device: str
    """`host`, `cuda:0`, ..."""
    size_bytes: int
    generation: int = 0
    """Grows with every deposition at the broker: two slabs of one name differ in it."""
    inode: int = 0
    """What tells this allocation from every other one: the memfd's inode, or a CUDA slab's generation. 0 before deposit."""
    run: str = ""
    """Empty for slabs that outlive runs."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """State of a run's actor."""

    state: str
    """`valid` or `torn`."""
    snapshot: int
    """VALID: its number. TORN: the number being replaced."""
    update_epoch: int
    """Of the update while TORN; 0 otherwise."""
    slabs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of one object class that a role holds on a device."""

    object_class: str
    role: str
    device: str
    phase: str
    """A value of Phase in peaks; `unspecified` in current rows."""
    size_bytes: int
    """Each slab counted once, however many engines map it."""
    slab_count: int = 0
    """Slabs behind the bytes; 0 for reported bytes."""
    residency: str = "unspecified"
    """A value of Residency: where the bytes are."""


@dataclass(frozen=True, slots=True)
class Ledger:
    rows: tuple[LedgerRow, ...]
    """Now."""
    peaks: tuple[LedgerRow, ...]
    """Largest bytes by phase since the run began."""
    host_limit_bytes: int
    """Host bytes that slabs may take in all; 0: no limit."""
    host_slab_bytes: int
    """Host bytes in slabs now, announced ones included."""
    counts: dict[str, int] = field(default_factory=dict)
    """`slabs`, `leases`, `sessions`, `former_sessions` and `tickets` that there are now, of all runs."""


def table(rows: Iterable[LedgerRow]) -> str:
    """The rows as text, a line each."""
    lines = [f"{'object class':<20} {'role':<12} {'device':<8} {'in':<7} {'bytes':>16} {'slabs':>6}"]
    lines += [f"{row.object_class:<20} {row.role:<12} {row.device:<8} {row.residency:<7} {row.size_bytes:>16,} "
              f"{row.slab_count or '-':>6}" for row in rows]
    return "\n".join(lines)
