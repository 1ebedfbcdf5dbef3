"""The streamed update's device memory and bus rate for models of several sizes: the peak must not grow with the model.

    PYTHONPATH=services:protos/gen:. python benchmarks/kernels/update_peak.py --model Qwen2.5-VL-3B Qwen2.5-VL-7B --out OUT.json

No model is there: its parameters' sizes, the optimizer state in pinned host memory (12 bytes a parameter and three spare chunks:
43 GiB for 3B, 93 for 7B), gradients and bfloat16 targets on the GPU. Beside it, in the same process, what the bus does both ways
at once with plain copies. A model whose state the host cannot hold is left out, and said so. `--device cpu --parameters N` tries
every step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rollplex.core.config import OptimizerConfig
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.work import UpdateOrder
from rollplex.memory.host_registration import HostRegistration
from rollplex.model import ActorLayout, read_model_config
from rollplex.trainer.flip_log import FlipLog, log_bytes
from rollplex.trainer.optimizer_state import OptimizerState, StateLayout
from rollplex.trainer.update import StreamedUpdate

PUBLISHED = Path(__file__).parents[2] / "services" / "rollplex" / "model" / "published"
COPY_BYTES = 2 << 30
BYTES_PER_PARAMETER = 24
"""Over the bus in an update: master and two moments, in and out."""


class Gradients:
    """Of every parameter, flat, on the device: what StreamedUpdate reads of a GradientBuffer."""

    apart = False

    def __init__(self, layout: StateLayout, device: str) -> None:
        self._layout = layout
        self.flat = torch.empty(layout.element_count, device=device).normal_(generator=torch.Generator(device).manual_seed(1))
        counts = [count for _, count in layout.element_counts]
        self.views = dict(zip((name for name, _ in layout.element_counts), self.flat.split(counts)))

    def chunk(self, index: int) -> torch.Tensor:
        start = self._layout.chunk_starts[index]
        return self.flat[start:start + self._layout.chunks[index].element_count]


class HostState:
    """Bytes of zeros in host memory that CUDA has pinned."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._registration = HostRegistration(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), size_bytes)

    def close(self) -> None:
        self._registration.close()
        # Tensors hold the mapping; the system takes it back with the last of them.
        self.bytes = None


def parameters_of(name: str) -> tuple[tuple[str, int], ...]:
    raw = (PUBLISHED / f"{name}.json").read_text()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(raw)
        shards = ActorLayout.build(read_model_config(Path(folder)), 1, "bfloat16").shards
    return tuple((name, math.prod(shard.full_shape)) for name, shard in shards.items())


def flat_parameters(count: int) -> tuple[tuple[str, int], ...]:
    return tuple((f"language_model.layers.{index}.w", part) for index, part in enumerate((count // 3, count - count // 3)))


def measure(name: str, parameters: tuple[tuple[str, int], ...], device: str, chunk_elements: int, repeats: int) -> dict[str, Any]:
    layout = StateLayout(parameters, chunk_elements, "float32")
    began = time.perf_counter()
    host = HostState(layout.size_bytes)
    pinned_s = time.perf_counter() - began
    result: dict[str, Any] = {"model": name, "parameters": layout.element_count, "state_bytes": layout.size_bytes,
                              "chunks": len(layout.chunks), "pinned_s": pinned_s}
    if device == "cuda":
        result["copy_both_ways_gb_per_s"] = both_ways(host.bytes, device)
    log = FlipLog(torch.zeros(log_bytes(len(layout.chunks)), dtype=torch.uint8), len(layout.chunks))
    state = OptimizerState(layout, host.bytes, log, new=True)
    state.finish_step(0)
    gradients = Gradients(layout, device)
    targets = {parameter: [torch.zeros(count, dtype=torch.bfloat16, device=device)] for parameter, count in parameters}
    before = allocated(device)
    update = StreamedUpdate(state, gradients, targets, OptimizerConfig(learning_rate=1e-3, chunk_elements=chunk_elements), device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates = []
    for step in range(1, repeats + 1):
        began = time.perf_counter()
        done = update.run(UpdateOrder(step, 1.0, 1.0, step))
        rates.append(done.state_bytes / (time.perf_counter() - began) / 1e9)
        if done.state_bytes != BYTES_PER_PARAMETER * layout.element_count:
            raise AssertionError(f"{done.state_bytes} bytes were moved for {layout.element_count} parameters")
    result |= {"update_gb_per_s": rates, "update_s": BYTES_PER_PARAMETER * layout.element_count / max(rates) / 1e9,
               "reported_peak_bytes": done.peak_state_bytes}
    if device == "cuda":
        result["measured_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        result["of_copy"] = max(rates) / result["copy_both_ways_gb_per_s"]
    smallest = min(parameters, key=lambda item: item[1])[0]
    if not state.master(smallest).any() or not torch.equal(targets[smallest][0].cpu(), state.master(smallest).bfloat16()):
        raise AssertionError(f"{smallest} was not updated, or not cast")
    host.close()
    return result


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def both_ways(host: torch.Tensor, device: str) -> float:
    """GB/s, in and out together, of one copy each way at the same time; the best of several."""
    size = min(COPY_BYTES, len(host) // 2)
    source, target = host[:size], host[size:2 * size]
    arriving, leaving = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    leaving.zero_()
    streams, best = (torch.cuda.Stream(), torch.cuda.Stream()), 0.0
    torch.cuda.synchronize()
    for _ in range(6):
        began = time.perf_counter()
        with torch.cuda.stream(streams[0]):
            arriving.copy_(source, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            target.copy_(leaving, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 2 * size / (time.perf_counter() - began) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["Qwen2.5-VL-3B", "Qwen2.5-VL-7B"])
    parser.add_argument("--parameters", type=int, nargs="*", default=[], help="sizes without a model, instead")
    parser.add_argument("--chunk-elements", type=int, default=OptimizerConfig().chunk_elements)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON, written after every model")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --parameters N tries every step")
    wanted = [(f"{count} parameters", flat_parameters(count)) for count in arguments.parameters] or [
        (name, parameters_of(name)) for name in arguments.model]
    limit, results = default_host_limit_bytes(), []
    for name, parameters in wanted:
        needed = StateLayout(parameters, arguments.chunk_elements, "float32").size_bytes
        if needed > limit:
            results.append({"model": name, "left_out": f"its state takes {needed:,} bytes of the host, which gives {limit:,}"})
        else:
            results.append(measure(name, parameters, arguments.device, arguments.chunk_elements, arguments.repeats))
        print(json.dumps(results[-1]), flush=True)
        if arguments.out:
            gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
            arguments.out.write_text(json.dumps({"torch": torch.__version__, "gpu": gpu, "results": results}, indent=1) + "\n")
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    peaks = {result["reported_peak_bytes"] for result in results if "reported_peak_bytes" in result}
    print(f"peak of the update on the device: {', '.join(f'{peak:,}' for peak in sorted(peaks))} bytes")


if __name__ == "__main__":
    main()
