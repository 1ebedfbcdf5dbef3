"""One process's own pages behind addresses that never change: for what visits a device and leaves it again."""

from __future__ import annotations

import torch

from rollplex.core.placement import Placement
from rollplex.memory import views
from rollplex.memory.driver import Driver


class DevicePages:
    """`back` and `drop` are the pair. Not thread-safe."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.backed = False
        self._driver = driver
        self._reservation = driver.reserve(size_bytes)
        self._base = views.reserved_tensor(driver, self._reservation, size_bytes)

    def back(self) -> None:
        """New pages of zeros; touching the tensors is allowed from here on. Idempotent. Raises OSError when memory is short."""
        if self.backed:
            return
        handle = self._driver.create(self.size_bytes, "pages")
        try:
            self._driver.map(self._reservation, handle, writable=True)
        finally:
            self._driver.release(handle)
        self.backed = True

    def drop(self) -> None:
        """The pages go back to the device; touching the tensors is a fault until the next `back`. Idempotent."""
        if self.backed:
            self._driver.unmap(self._reservation)
            self.backed = False

    def tensor(self, placement: Placement) -> torch.Tensor:
        """A view that lives as long as this object, backed or not. Raises ValueError when it reaches past the end."""
        return views.tensor(self._base, placement)

    def close(self) -> None:
        """Gives the addresses back. Tensors made before must not be touched any more."""
        self._driver.free(self._reservation)
        self.backed = False
