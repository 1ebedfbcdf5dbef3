"""A stream of some of a GPU's SMs, in this process, beside its other streams: CUDA's green contexts, through cuda-bindings.

A green context shares the primary context's memory: what torch or a VMM mapping made is valid on its stream. Under MPS it
divides what the client has, so a client with a thread percentage of its own must not also ask for one (NVIDIA's forum, 316336).
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from rollplex.core.errors import InternalError
from rollplex.core.sharing import green_sm_count


class GreenStream:
    """`close` gives the SMs back. The primary context of the device must be current on the calling thread, as torch has it."""

    def __init__(self, ordinal: int, percent: int) -> None:
        """Raises InternalError with CUDA's own name for what it refuses."""
        device = _call("cuDeviceGet", driver.cuDeviceGet(ordinal))
        whole = _call("cuDeviceGetDevResource",
                      driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        self.device_sm_count = int(whole.sm.smCount)
        groups, _, _ = _call("cuDevSmResourceSplitByCount", driver.cuDevSmResourceSplitByCount(
            1, whole, 0, green_sm_count(self.device_sm_count, percent)))
        self.sm_count = int(groups[0].sm.smCount)
        """As CUDA rounded it."""
        description = _call("cuDevResourceGenerateDesc", driver.cuDevResourceGenerateDesc([groups[0]], 1))
        self._context = _call("cuGreenCtxCreate", driver.cuGreenCtxCreate(
            description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
        self._stream = _call("cuGreenCtxStreamCreate", driver.cuGreenCtxStreamCreate(
            self._context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        self._done = self._event()

    @property
    def handle(self) -> int:
        """The CUstream, for torch.cuda.ExternalStream."""
        return int(self._stream)

    def join(self, waiting: int) -> None:
        """What is launched on the stream `waiting` (a CUstream of the primary context) from now on comes after all that is in
        this one. Nothing waits on the host."""
        _call("cuEventRecord", driver.cuEventRecord(self._done, self._stream))
        _call("cuStreamWaitEvent", driver.cuStreamWaitEvent(driver.CUstream(waiting), self._done, 0))

    def close(self) -> None:
        """After the stream has been synchronised."""
        _call("cuEventDestroy", driver.cuEventDestroy(self._done))
        _call("cuStreamDestroy", driver.cuStreamDestroy(self._stream))
        _call("cuGreenCtxDestroy", driver.cuGreenCtxDestroy(self._context))

    def _event(self) -> Any:
        """An event of the green context: one is recorded in streams of the context that it was made in. Any stream may wait
        for it."""
        _call("cuCtxPushCurrent", driver.cuCtxPushCurrent(_call("cuCtxFromGreenCtx", driver.cuCtxFromGreenCtx(self._context))))
        try:
            return _call("cuEventCreate", driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        finally:
            _call("cuCtxPopCurrent", driver.cuCtxPopCurrent())


def _call(name: str, answer: tuple) -> Any:
    """The results after the status: none, one, or a tuple."""
    status, *results = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise InternalError(f"{name}: {status.name}; mesh.sharing = \"mps-priority\" needs no green context",
                            reason="GREEN_CONTEXT", call=name)
    return results[0] if len(results) == 1 else tuple(results)
