"""How much memory of this node slabs may take: the container's limit counts, not what the machine has."""

from __future__ import annotations

from pathlib import Path


def default_host_limit_bytes() -> int:
    """Seven eighths of what this process may use: its cgroups' smallest limit, or the machine's memory."""
    limits = [_memory_total_bytes(), *_cgroup_limits_bytes()]
    return min(limits) * 7 // 8


def _memory_total_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemTotal; set [broker] host_limit_bytes")


def _cgroup_limits_bytes() -> list[int]:
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        inner = root / path.lstrip("/")
        # Inside a container the path may be the host's; then only the root of the hierarchy is there.
        for folder in [inner, *inner.parents]:
            file = folder / name
            if folder.is_relative_to(root) and file.exists():
                text = file.read_text().strip()
                if text != "max":
                    limits.append(int(text))
    return limits
