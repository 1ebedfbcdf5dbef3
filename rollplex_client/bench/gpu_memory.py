"""How much GPU memory is in use while something runs, as the driver sees it: all processes, whatever allocated it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollplex.core.visible_gpus import nvml_handle

PERIOD_S = 0.02


@dataclass(slots=True)
class MemoryWatch:
    """Bytes of the first GPUs together; None where there is no driver that tells."""

    before_bytes: int | None = None
    peak_bytes: int | None = None


@contextlib.contextmanager
def watch_memory(device: str, gpus: int = 1) -> Iterator[MemoryWatch]:
    """Samples every 20 ms: a peak that is shorter may be missed."""
    used = _reader(gpus) if device == "cuda" else None
    if used is None:
        yield MemoryWatch()
        return
    with watched(used) as watch:
        yield watch


@contextlib.contextmanager
def watched(used: Callable[[], int]) -> Iterator[MemoryWatch]:
    """The largest of what `used` says meanwhile."""
    first = used()
    watch, ended = MemoryWatch(first, first), threading.Event()

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            watch.peak_bytes = max(watch.peak_bytes, used())

    thread = threading.Thread(target=sample, name="gpu-memory", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def _reader(gpus: int) -> Callable[[], int] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [nvml_handle(pynvml, index) for index in range(gpus)]
        _ = pynvml.nvmlDeviceGetMemoryInfo(handles[0]).used
    except (pynvml.NVMLError, IndexError):
        return None
    return lambda: sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
