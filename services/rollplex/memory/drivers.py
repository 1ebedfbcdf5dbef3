"""Which driver serves a device."""

from __future__ import annotations

from functools import cache

from rollplex.core.errors import BadInput
from rollplex.core.topology import is_cuda, is_host
from rollplex.memory.driver import Driver
from rollplex.memory.host_driver import HostDriver


@cache
def driver_of(device: str) -> Driver:
    """One a device and process. Raises BadInput (NO_DRIVER) for a device that this machine cannot serve."""
    if is_host(device):
        return HostDriver()
    if is_cuda(device):
        try:
            from rollplex.memory.cuda_driver import CudaDriver

            return CudaDriver(device)
        except (ImportError, OSError) as error:
            raise BadInput(f"device {device}: {error}", reason="NO_DRIVER", device=device) from error
    raise BadInput(f"device {device!r} is neither host, host:N nor cuda:N", reason="NO_DRIVER", device=device)
