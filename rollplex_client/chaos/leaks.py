"""What processes hold, and what the broker keeps: counted before and after, compared. Pure functions over /proc and GetMesh.

    before = snapshot({"trainer-0": pid}, client.mesh())
    ...
    assert not difference(before, snapshot({"trainer-0": pid}, client.mesh()))
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollplex_client.results import Mesh

ANONYMOUS = "anonymous"
"""Mappings of no file: allocators split and join them as they like, so their number says nothing."""
TRANSIENT = ("tickets",)
"""Custody counts that pass by themselves: what nobody redeems is dropped by the next decision about leases."""
POOLS = frozenset({"event_engine", "grpc_global_tim", "resolver-execut", "default-executo", "timer_manager"})
"""Threads that gRPC's own pools start and end by load."""


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """What one process holds."""

    pid: int
    descriptors: Counter[str]
    """By what they are open on: `socket`, `pipe`, `memfd:rollplex:runs/#/media/#`, `/path`."""
    mappings: Counter[str]
    """As descriptors, and `anonymous`."""
    threads: Counter[str]
    """By name, as the kernel has it (15 characters)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    processes: Mapping[str, ProcessCounts]
    """By service."""
    custody: Mapping[str, int] = field(default_factory=dict)
    """Slabs, leases, sessions, ... at the broker; `slabs/OBJECT_CLASS` by class."""


def snapshot(pids: Mapping[str, int], mesh: Mesh | None = None) -> Snapshot:
    """Counts what each process holds now; one that has ended is left out."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[name] = count_process(pid)
    return Snapshot(found, custody_counts(mesh) if mesh is not None else {})


def count_process(pid: int) -> ProcessCounts:
    """Raises FileNotFoundError or ProcessLookupError when there is no such process, PermissionError for another user's."""
    root = Path("/proc", str(pid))
    descriptors: Counter[str] = Counter()
    for entry in (root / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            descriptors[kind_of(str(entry.readlink()))] += 1
    threads: Counter[str] = Counter()
    for entry in (root / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            threads[(entry / "comm").read_text().strip()] += 1
    return ProcessCounts(pid, descriptors, count_mappings((root / "maps").read_text()), threads)


def count_mappings(text: str) -> Counter[str]:
    """Of a /proc/PID/maps. A file's consecutive segments are one mapping each, as the kernel lists them."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        # address, permissions, offset, device, inode, and what is left.
        fields = line.split(None, 5)
        counts[kind_of(fields[5]) if len(fields) > 5 else ANONYMOUS] += 1
    return counts


def kind_of(target: str) -> str:
    """What a descriptor or mapping points at, without what differs from one iteration, run or connection to the next."""
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    if target.startswith("[") or not target:
        return ANONYMOUS
    target = target.removesuffix(" (deleted)")
    if target.startswith("/memfd:"):
        # "rollplex:runs/NAME/media/iteration-3/0": runs and numbers differ, classes stay.
        return re.sub(r"\d+", "#", re.sub(r"runs/[^/]+/", "runs/*/", target.removeprefix("/")))
    return target


def custody_counts(mesh: Mesh) -> dict[str, int]:
    counts = {name: count for name, count in mesh.custody.items() if name not in TRANSIENT}
    for row in mesh.ledger:
        if row.slab_count:
            key = f"slabs/{row.object_class}"
            counts[key] = counts.get(key, 0) + row.slab_count
    return counts


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """What there is more of than before, a line each; empty when nothing leaked.

    Only processes that are in both under one pid are compared: another process has another past. Fewer is no leak, and neither
    are anonymous mappings or the threads of gRPC's own pools.
    """
    lines = []
    for name, then in before.processes.items():
        now = after.processes.get(name)
        if now is None or now.pid != then.pid:
            continue
        for what, old, new, ignored in (("descriptors", then.descriptors, now.descriptors, ()),
                                        ("mappings", then.mappings, now.mappings, (ANONYMOUS,)),
                                        ("threads", then.threads, now.threads, POOLS)):
            lines += [f"{name}: {what} of {kind}: {had} -> {has}" for kind, had, has in _more(old, new, ignored)]
    custody = _more(before.custody, after.custody, ()) if before.custody and after.custody else []
    return lines + [f"broker: {kind}: {had} -> {has}" for kind, had, has in custody]


def _more(old: Mapping[str, int], new: Mapping[str, int], ignored: Iterable[str]) -> list[tuple[str, int, int]]:
    return [(kind, old.get(kind, 0), count) for kind, count in sorted(new.items())
            if count > old.get(kind, 0) and kind not in ignored]


def totals(taken: Snapshot) -> dict[str, dict[str, int]]:
    """For a table: service -> descriptors, mappings (of files), threads (but gRPC's own); `broker custody` beside them."""
    table = {name: {"descriptors": sum(process.descriptors.values()),
                    "mappings": sum(count for kind, count in process.mappings.items() if kind != ANONYMOUS),
                    "threads": sum(count for kind, count in process.threads.items() if kind not in POOLS)}
             for name, process in taken.processes.items()}
    return table | ({"custody": dict(taken.custody)} if taken.custody else {})
