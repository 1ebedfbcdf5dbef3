"""What a benchmark's numbers are set against: the hardware, its versions, and what it reaches when nothing else runs.

`python -m rollplex.bench.probe --device cuda` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib import metadata
from typing import Any

import torch

STATED = {"H200": (989.5e12, 4.8e12), "H100": (989.5e12, 3.35e12), "H800": (989.5e12, 3.35e12), "H20": (148e12, 4.0e12),
          "A100": (312e12, 2.039e12), "B200": (2250e12, 8.0e12)}
"""Name -> dense bfloat16 FLOP/s and bytes/s of memory, from NVIDIA's data sheets of the SXM boards."""
PACKAGES = ("torch", "transformers", "vllm", "megatron-core", "trl", "accelerate", "safetensors", "av", "grpcio", "cuda-bindings")


def probe(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": device, "python": platform.python_version(), "machine": platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)), "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {name: version for name in PACKAGES if (version := _version(name))}, "gpus": 0,
        "stated_flops": None, "stated_bandwidth": None}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        flops, bandwidth = stated(properties.name)
        facts |= {"gpus": torch.cuda.device_count(), "gpu": properties.name, "hbm_bytes": properties.total_memory,
                  "cuda": torch.version.cuda, "sms": properties.multi_processor_count, "stated_flops": flops,
                  "stated_bandwidth": bandwidth}
    facts["measured_flops"], facts["measured_bandwidth"] = measure_flops(device), measure_bandwidth(device)
    return facts


def stated(name: str) -> tuple[float | None, float | None]:
    """Of a GPU by its name; None for one that is not known."""
    # Longest first: "H200" begins with "H20".
    for known in sorted(STATED, key=len, reverse=True):
        if known in name:
            return STATED[known]
    return None, None


def measure_flops(device: str) -> float:
    """FLOP/s of square bfloat16 products (float32 on a CPU), the best of several."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device)


def measure_bandwidth(device: str) -> float:
    """Bytes/s of a copy in device memory, read and written bytes counted, the best of several."""
    size = 4 << 30 if device == "cuda" else 64 << 20
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Any, device: str, repeats: int = 10) -> float:
    best = float("inf")
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m rollplex.bench.probe", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    print(json.dumps(probe(parser.parse_args().device)))
