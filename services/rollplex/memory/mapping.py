"""A reservation whose tensors keep their address while slabs come and go behind it."""

from __future__ import annotations

import torch

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.memory import views
from rollplex.memory.driver import Driver
from rollplex.memory.lease import SlabLease


class MappedSlab:
    """Room for one slab of up to `size_bytes`. `bind` and `unbind` are the pair; not thread-safe."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.inode = 0
        """Of the bound slab; 0 while unbound."""
        self.writable = False
        self._zeros = False
        self._driver = driver
        self._reservation = driver.reserve(size_bytes)
        self._base = views.reserved_tensor(driver, self._reservation, size_bytes)

    @property
    def address(self) -> int:
        return self._reservation.address

    @property
    def bound(self) -> bool:
        return self.inode != 0

    def bind(self, lease: SlabLease, *, writable: bool = False) -> None:
        """Maps the leased slab, in place of the bound one. Raises ValueError when it is larger than the reservation,
        WrongState for a lost lease and for writing under a READ lease (the system refuses that too)."""
        if lease.lost:
            raise WrongState(f"the lease on {lease.slab.name} was lost; lease it again", reason="LEASE_LOST")
        if writable and lease.mode is not LeaseMode.WRITE:
            raise WrongState(f"{lease.slab.name} is leased for reading only", reason="READ_ONLY_LEASE")
        if self.bound or self._zeros:
            self.unbind()
        handle = self._driver.import_fd(lease.fd, lease.slab.size_bytes)
        try:
            self._driver.map(self._reservation, handle, writable=writable)
        finally:
            self._driver.release(handle)
        self.inode, self.writable = lease.slab.inode, writable

    def map_zeros(self) -> None:
        """Readable zeros in place of a slab, until the next bind or unbind: for code that reads tensors before their slab
        exists. Not bound. Raises WrongState while a slab is bound."""
        if self.bound:
            raise WrongState("a slab is bound; unbind it first", reason="SLAB_BOUND")
        self._driver.map_zeros(self._reservation)
        self._zeros = True

    def unbind(self) -> None:
        """Takes the slab away; touching the tensors is a fault until the next bind. Idempotent."""
        if not self.bound and not self._zeros:
            return
        self._driver.unmap(self._reservation)
        self._zeros = False
        self.inode, self.writable = 0, False

    def tensor(self, placement: Placement) -> torch.Tensor:
        """A view that lives as long as this object, bound or not. Raises ValueError when it reaches past the end."""
        return views.tensor(self._base, placement)

    def copy_from(self, other: MappedSlab, start: int, stop: int) -> None:
        """Bytes of another slab, to the same place in this one, which is bound for writing. Done when this is unbound."""
        self._driver.copy(self._base[start:stop], other._base[start:stop])

    def close(self) -> None:
        """Gives the addresses back. Tensors made before must not be touched any more."""
        if self._reservation.size_bytes:
            self._driver.free(self._reservation)
            self._reservation = type(self._reservation)(0, 0)
            self.inode, self.writable = 0, False
