"""Each device's memory at the broker: a budget that is kept up front, and the ledger held against the driver's figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.core.errors import OutOfMemory
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.memory.slab import Slab

Held = Mapping[str, Mapping[str, int]]
"""Device -> object class -> bytes in its memory, as the ledger has them."""


class DeviceMeter(Protocol):
    """What the driver says of a device; None where it says nothing. nvml.py has the one of NVIDIA's GPUs."""

    def used_bytes(self, device: str) -> int | None: ...

    def total_bytes(self, device: str) -> int | None: ...


class NoMeter:
    """Where there is no GPU to ask about."""

    def used_bytes(self, device: str) -> None:
        return None

    def total_bytes(self, device: str) -> None:
        return None


@dataclass(slots=True)
class HbmBudget:
    """Pure but for the meter. `limit_bytes` of each device; 0: the meter's total, and no limit where it has none."""

    limit_bytes: int = 0
    slack_bytes: int = 0
    """By how much the unexplained bytes of a phase may grow over those of the run's first iteration."""
    meter: DeviceMeter = field(default_factory=NoMeter)
    run: str = ""
    first: dict[tuple[str, Phase], int] = field(default_factory=dict)
    """Device and phase -> unexplained bytes when that phase of the run first ended."""

    def limit(self, device: str) -> int:
        """0: none. Plain host memory is no device's."""
        return 0 if device == "host" else self.limit_bytes or self.meter.total_bytes(device) or 0

    def check_slab(self, slab: Slab, slab_bytes: int, reported_bytes: int, table: str) -> None:
        """`slab_bytes` are in slabs of its device, `reported_bytes` beside them. Raises OutOfMemory with the ledger's table."""
        limit, taken = self.limit(slab.device), slab_bytes + reported_bytes
        if limit and taken + slab.size_bytes > limit:
            raise OutOfMemory(
                f"{slab.size_bytes:,} bytes for slab {slab.name} do not fit: {taken:,} of {limit:,} bytes of {slab.device} are "
                f"taken (mesh.hbm_budget_gib)\n{table}", reason="OUT_OF_DEVICE_MEMORY", device=slab.device,
                size_bytes=slab.size_bytes, taken_bytes=taken, limit_bytes=limit)

    def check_phase(self, phase: Phase, held: Held, planned: Iterable[PlannedBytes]) -> None:
        """Of each class counts what is held or what is planned, whichever is more: a class that is planned is not held twice.

        Raises OutOfMemory with the table of the first device that has no room. IDLE needs nothing.
        """
        if phase is Phase.IDLE:
            return
        needs: dict[str, dict[str, int]] = {}
        for item in planned:
            of_device = needs.setdefault(item.device, {})
            of_device[item.object_class] = of_device.get(item.object_class, 0) + item.size_bytes
        for device in sorted({*held, *needs}):
            limit, has, wants = self.limit(device), held.get(device, {}), needs.get(device, {})
            counted = {name: max(has.get(name, 0), wants.get(name, 0)) for name in sorted({*has, *wants})}
            total = sum(counted.values())
            if limit and total > limit:
                raise OutOfMemory(
                    f"phase {phase.value} does not fit {device}: {total:,} bytes are held or planned, {limit:,} may be taken "
                    f"(mesh.hbm_budget_gib)\n{_table(has, wants, counted)}", reason="PHASE_OVER_BUDGET", device=device,
                    phase=phase.value, needed_bytes=total, limit_bytes=limit)

    def unexplained(self, held: Held) -> dict[str, int]:
        """Device -> what the driver counts as used beyond the ledger: contexts, CUDA graphs, allocator caches, strangers."""
        used = {device: self.meter.used_bytes(device) for device in held}
        return {device: size - sum(held[device].values()) for device, size in used.items() if size is not None}

    def check_growth(self, run: str, ended: Phase, unexplained: Mapping[str, int]) -> list[str]:
        """Sentences on devices whose unexplained bytes have grown by more than the slack since the phase first ended.

        IDLE is left out: before the first iteration nothing is warm.
        """
        if run != self.run:
            self.run = run
            self.first.clear()
        if ended is Phase.IDLE:
            return []
        wrong = []
        for device, size in unexplained.items():
            grown = size - self.first.setdefault((device, ended), size)
            if grown > self.slack_bytes:
                wrong.append(f"{device} holds {size:,} bytes in phase {ended.value} that the ledger does not explain, {grown:,} "
                             f"more than in the first iteration (broker.unexplained_slack_gib)")
        return wrong


def _table(held: Mapping[str, int], planned: Mapping[str, int], counted: Mapping[str, int]) -> str:
    lines = [f"{'object class':<20} {'held':>16} {'planned':>16} {'counted':>16}"]
    lines += [f"{name:<20} {held.get(name, 0):>16,} {planned.get(name, 0):>16,} {size:>16,}" for name, size in counted.items()]
    return "\n".join(lines)
