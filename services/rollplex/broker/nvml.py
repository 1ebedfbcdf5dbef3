"""What NVIDIA's management library says of a GPU's memory. It makes no CUDA context, so the broker may ask it."""

from __future__ import annotations

import logging
from typing import Any

from rollplex.broker.hbm import DeviceMeter, NoMeter
from rollplex.core.topology import is_cuda
from rollplex.core.visible_gpus import nvml_handle

log = logging.getLogger(__name__)


class NvmlMeter:
    """A DeviceMeter. "cuda:N" is the N-th of the GPUs that CUDA_VISIBLE_DEVICES leaves to the mesh's processes."""

    def __init__(self, library: Any) -> None:
        """`library`: pynvml, initialised."""
        self._library = library
        self._handles: dict[str, Any] = {}

    def used_bytes(self, device: str) -> int | None:
        memory = self._memory(device)
        return None if memory is None else int(memory.used)

    def total_bytes(self, device: str) -> int | None:
        memory = self._memory(device)
        return None if memory is None else int(memory.total)

    def process_bytes(self, device: str) -> dict[int, int] | None:
        """Of each compute process that NVML can name and size; in a container these may be other pids than ours, or none."""
        if self._memory(device) is None:
            return None
        try:
            listed = self._library.nvmlDeviceGetComputeRunningProcesses(self._handles[device])
        except self._library.NVMLError as error:
            log.warning("NVML does not tell the processes on %s: %s", device, error)
            return None
        sized = {int(process.pid): process.usedGpuMemory for process in listed}
        return {pid: int(size) for pid, size in sized.items() if size is not None}

    def _memory(self, device: str) -> Any:
        if not is_cuda(device):
            return None
        try:
            if device not in self._handles:
                self._handles[device] = nvml_handle(self._library, int(device.removeprefix("cuda:")))
            return self._library.nvmlDeviceGetMemoryInfo(self._handles[device])
        except (self._library.NVMLError, IndexError) as error:
            log.warning("NVML does not tell the memory of %s: %s", device, error)
            return None


def device_meter() -> DeviceMeter:
    """NvmlMeter where the library and a driver are, else NoMeter, and the log says so once."""
    try:
        import pynvml
    except ImportError:
        log.warning("nvidia-ml-py is not installed: GPUs' memory is not held against the ledger")
        return NoMeter()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.warning("NVML cannot be asked (%s): GPUs' memory is not held against the ledger", error)
        return NoMeter()
    return NvmlMeter(pynvml)
