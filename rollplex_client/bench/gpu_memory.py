"""How much of a GPU's memory is in use while something runs, as the driver sees it: all processes, whatever allocated it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

PERIOD_S = 0.02


@dataclass(slots=True)
class MemoryWatch:
    """Bytes of GPU 0; None where there is no driver to ask."""

    before_bytes: int | None = None
    peak_bytes: int | None = None


@contextlib.contextmanager
def watch_memory(device: str) -> Iterator[MemoryWatch]:
    """Samples every 20 ms: a peak that is shorter may be missed."""
    watch = MemoryWatch()
    if device != "cuda":
        yield watch
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    watch.before_bytes = watch.peak_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            watch.peak_bytes = max(watch.peak_bytes, pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    thread = threading.Thread(target=sample, name="gpu-memory", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        pynvml.nvmlShutdown()
