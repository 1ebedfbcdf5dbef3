"""The actor snapshot in one engine: leased, and mapped at addresses that never change."""

from __future__ import annotations

import torch

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.memory.client import BrokerSession, SlabLease
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.model import ActorLayout


class ActorMapping:
    """One device's actor slab. `bind` (or `bind_for_update`) and `unbind` are the pair; owner thread only."""

    def __init__(self, session: BrokerSession, layout: ActorLayout, device: str) -> None:
        """`device`: Topology.device_name of the device whose slab this engine maps."""
        self.layout, self.device = layout, device
        self.slab = ""
        """Name of the opened slab; empty before `open`."""
        self._session = session
        self._mapped = MappedSlab(driver_of(device), layout.size_bytes)
        self._lease: SlabLease | None = None
        self._views = {name: self._mapped.tensor(place) for name, place in layout.placements("").items()}

    @property
    def inode(self) -> int:
        """Of the bound slab's file; 0 while unbound."""
        return self._mapped.inode

    @property
    def bound(self) -> bool:
        return self._mapped.bound

    @property
    def writable(self) -> bool:
        return self._mapped.writable

    @property
    def address(self) -> int:
        """First byte of the reservation; a view's data_ptr is this plus its offset."""
        return self._mapped.address

    def open(self, slab_name: str) -> None:
        """Chooses the slab that the next bind maps; leaves another one that is bound."""
        if slab_name != self.slab:
            self.unbind()
        self.slab = slab_name

    def bind(self, snapshot: int) -> int:
        """READ lease and mapping of that snapshot; returns the slab's inode.

        Raises WrongState when nothing is open or the slab holds another snapshot; what was bound before then stays so.
        """
        self._exchange(self._acquire(LeaseMode.READ, snapshot=snapshot), writable=False)
        return self.inode

    def bind_for_update(self, update_epoch: int | None) -> int:
        """WRITE lease and writable mapping; returns the slab's inode.

        `update_epoch` is the broker's; None is the exclusive lease under which a slab is filled before registration.
        """
        self._exchange(self._acquire(LeaseMode.WRITE, update_epoch=update_epoch), writable=True)
        return self.inode

    def map_zeros(self) -> None:
        """Every view reads as zeros, with nothing leased, until the next bind or unbind: for an engine's warm-up."""
        self._mapped.map_zeros()

    def unbind(self) -> None:
        """Unmaps, then drops the lease. Idempotent. Touching a view afterwards is a fault."""
        self._mapped.unbind()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def views(self) -> dict[str, torch.Tensor]:
        """By rollout name: the same tensors for ever, valid while something is bound."""
        return dict(self._views)

    def close(self) -> None:
        """Unbinds and gives the addresses back; no view may be touched any more."""
        self.unbind()
        self._mapped.close()

    def _acquire(self, mode: LeaseMode, **expected: int | None) -> SlabLease:
        if not self.slab:
            raise WrongState("no actor slab is open; open a run first", reason="NO_RUN")
        return self._session.lease(self.slab, mode, **expected)

    def _exchange(self, lease: SlabLease, *, writable: bool) -> None:
        """Maps the new lease's slab, then drops the old lease, so that a refusal changes nothing."""
        try:
            found = (lease.slab.size_bytes, lease.slab.device)
            if found != (self.layout.size_bytes, self.device):
                raise WrongState(f"slab {self.slab} has {found[0]} bytes on {found[1]}; this engine's layout has "
                                 f"{self.layout.size_bytes} on {self.device}", reason="LAYOUT_MISMATCH")
            self._mapped.bind(lease, writable=writable)
        except BaseException:
            lease.release()
            raise
        previous, self._lease = self._lease, lease
        if previous is not None:
            previous.release()
