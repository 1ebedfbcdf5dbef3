"""What the coordinator itself costs: iterations over engines that answer at once.

    python benchmarks/coordinator/overhead.py [--groups 1000] [--samples 8] [--iterations 50] [--out FILE]

Everything but the engines is real: intake with the checkpoint's tokenizer, broker, journal, events, rewards over gRPC,
barriers. A group's milliseconds are the wall time from SubmitIteration to DONE, divided by the groups.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from stub_mesh import stub_mesh, text_rows  # noqa: E402
from tiny_checkpoint import save_tiny  # noqa: E402


def own_bytes() -> int:
    """Anonymous memory of this process, which is coordinator, broker and stubs in one."""
    gc.collect()
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


async def measure(groups: int, samples: int, iterations: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="rollplex-bench-") as directory:
        checkpoint = save_tiny(Path(directory) / "checkpoint")
        async with stub_mesh(Path(directory) / "run", checkpoint) as mesh:
            await mesh.coordinator.create_run("bench", json.dumps({"sampling": {"samples_per_group": samples}}))
            rows, seconds, memory = text_rows(groups), [], []
            for number in range(iterations):
                began = time.monotonic()
                iteration, _ = await mesh.coordinator.submit("bench", rows, "", validation=False)
                done = await mesh.finished(iteration.key, 600.0)
                seconds.append(time.monotonic() - began)
                mesh.trainer.trained.clear()  # the stub keeps what it is told; the coordinator must not
                memory.append(own_bytes())
                if done.state.value != "done":
                    raise RuntimeError(f"iteration {number}: {done.error}")
                print(f"iteration {number}: {1000 * seconds[-1] / groups:.2f} ms a group, {memory[-1] / 2**20:.0f} MiB",
                      flush=True)
            journal_bytes = sum(file.stat().st_size for file in (Path(directory) / "run").glob("journal*"))
    warm = len(memory) // 5
    return {"groups": groups, "samples_per_group": samples, "iterations": iterations,
            "ms_per_group_median": 1000 * statistics.median(seconds) / groups,
            "ms_per_group_max": 1000 * max(seconds) / groups,
            "memory_after_warmup_bytes": memory[warm], "memory_end_bytes": memory[-1],
            "journal_bytes_per_sample": journal_bytes / (groups * samples * iterations)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.groups, options.samples, options.iterations))
    figures |= {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
                "command": "python benchmarks/coordinator/overhead.py " + " ".join(sys.argv[1:])}
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
