"""`grow_memory.py GIB`: touches that much host memory, on one thread and no faster than it comes, and gives it back.

For virtual machines whose memory starts small and grows as it is used: a mesh pins tens of GiB on many threads at once.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

PIECE = 256 << 20
MARGIN_KIB = 4 << 20
"""Left to others; while less is available, the machine is given time."""
PATIENCE_S = 20.0


def meminfo(name: str) -> int:
    """KiB."""
    return next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(name + ":"))


def main(wanted_gib: float) -> None:
    began, held = time.monotonic(), []
    print(f"MemTotal {meminfo('MemTotal') >> 20} GiB", flush=True)
    if meminfo("MemTotal") >> 20 >= wanted_gib:
        return
    for _ in range(int(wanted_gib * (1 << 30)) // PIECE):
        deadline = time.monotonic() + PATIENCE_S
        while meminfo("MemAvailable") < MARGIN_KIB + (PIECE >> 10):
            if time.monotonic() > deadline:
                print("no more memory comes", flush=True)
                break
            time.sleep(0.05)
        else:
            held.append(mmap.mmap(-1, PIECE))
            held[-1].madvise(23)  # MADV_POPULATE_WRITE
            continue
        break
    print(f"touched {len(held) * PIECE >> 30} GiB in {time.monotonic() - began:.0f} s, MemTotal {meminfo('MemTotal') >> 20} GiB",
          flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
