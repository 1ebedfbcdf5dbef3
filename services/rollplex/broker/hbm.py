"""Each device's memory at the broker: a budget that is kept up front, and the ledger held against the driver's figure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.core.errors import OutOfMemory
from rollplex.core.phases import Phase
from rollplex.core.residency import PlannedBytes
from rollplex.memory.slab import Slab

log = logging.getLogger(__name__)

Held = Mapping[str, Mapping[str, int]]
"""Device -> object class -> bytes in its memory, as the ledger has them."""


class DeviceMeter(Protocol):
    """What the driver says of a device; None where it says nothing. nvml.py has the one of NVIDIA's GPUs."""

    def used_bytes(self, device: str) -> int | None: ...

    def total_bytes(self, device: str) -> int | None: ...

    def process_bytes(self, device: str) -> Mapping[int, int] | None:
        """By process, those of this PID namespace; None where the driver does not tell them apart."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """What the driver says of a device at one moment."""

    used_bytes: int
    process_bytes: Mapping[int, int] | None = None


class NoMeter:
    """Where there is no GPU to ask about."""

    def used_bytes(self, device: str) -> None:
        return None

    def total_bytes(self, device: str) -> None:
        return None

    def process_bytes(self, device: str) -> None:
        return None


@dataclass(slots=True)
class HbmBudget:
    """Pure but for the meter. `limit_bytes` of each device; 0: the meter's total, and no limit where it has none."""

    limit_bytes: int = 0
    slack_bytes: int = 0
    """By how much the unexplained bytes of a phase may grow over those of the run's first iteration."""
    meter: DeviceMeter = field(default_factory=NoMeter)
    run: str = ""
    first: dict[tuple[str, Phase], tuple[int, int | None]] = field(default_factory=dict)
    """Device and phase -> unexplained bytes, and those of our processes, when that phase of the run first ended."""
    totals: dict[str, int] = field(default_factory=dict)

    def limit(self, device: str) -> int:
        """0: none. Plain host memory is no device's."""
        if device == "host" or self.limit_bytes:
            return 0 if device == "host" else self.limit_bytes
        if device not in self.totals:
            self.totals[device] = self.meter.total_bytes(device) or 0
        return self.totals[device]

    def read(self, devices: Iterable[str]) -> dict[str, Reading]:
        """Asks the driver, which may take its time: on a thread. Devices of which it says nothing are left out."""
        used = {device: self.meter.used_bytes(device) for device in devices}
        return {device: Reading(size, self.meter.process_bytes(device)) for device, size in used.items() if size is not None}

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

    @staticmethod
    def unexplained(held: Held, readings: Mapping[str, Reading]) -> dict[str, int]:
        """Device -> what the driver counts as used beyond the ledger: contexts, CUDA graphs, allocator caches, strangers."""
        return {device: reading.used_bytes - sum(held.get(device, {}).values()) for device, reading in readings.items()}

    def check_growth(self, run: str, ended: Phase, held: Held, readings: Mapping[str, Reading], ours: Set[int]) -> list[str]:
        """Sentences on devices whose unexplained bytes have grown by more than the slack since the phase first ended, where the
        driver shows that processes of `ours` have grown so. What a stranger takes, or nobody can tell apart, is logged.

        IDLE is left out: before the first iteration nothing is warm.
        """
        if run != self.run:
            self.run = run
            self.first.clear()
        if ended is Phase.IDLE:
            return []
        wrong = []
        for device, size in self.unexplained(held, readings).items():
            mine = _mine(readings[device], ours)
            first, first_mine = self.first.setdefault((device, ended), (size, mine))
            grown = size - first
            if grown <= self.slack_bytes:
                continue
            sentence = (f"{device} holds {size:,} bytes in phase {ended.value} that the ledger does not explain, {grown:,} more "
                        "than in the first iteration (broker.unexplained_slack_gib)")
            if mine is not None and first_mine is not None and mine - first_mine > self.slack_bytes:
                wrong.append(sentence)
            else:
                log.warning("%s; they are not known to be this mesh's: somebody else computes there", sentence)
        return wrong


def _mine(reading: Reading, ours: Set[int]) -> int | None:
    """Bytes of our processes; None when the driver lists none of them."""
    listed = {} if reading.process_bytes is None else reading.process_bytes
    return sum(listed[pid] for pid in ours & listed.keys()) if ours & listed.keys() else None


def _table(held: Mapping[str, int], planned: Mapping[str, int], counted: Mapping[str, int]) -> str:
    lines = [f"{'object class':<20} {'held':>16} {'planned':>16} {'counted':>16}"]
    lines += [f"{name:<20} {held.get(name, 0):>16,} {planned.get(name, 0):>16,} {size:>16,}" for name, size in counted.items()]
    return "\n".join(lines)
