"""A trainer rank's slabs at the broker: optimizer state, flip log, gradients. They outlive the process.

A new run: `delete_earlier`, `create_slabs`, RunState(new=True), ActorSlabs.load. After a restart: RunState(new=False) alone.
"""

from __future__ import annotations

import math

from rollplex.core.config import OptimizerConfig
from rollplex.core.errors import WrongState
from rollplex.core.ids import actor_slab, state_slab
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.core.topology import is_host
from rollplex.memory.client import BrokerSession, SlabLease
from rollplex.memory.drivers import driver_of
from rollplex.memory.host_registration import HostRegistration
from rollplex.memory.mapping import MappedSlab
from rollplex.model import ActorLayout, module_of
from rollplex.trainer.flip_log import log_bytes
from rollplex.trainer.optimizer_state import StateLayout


def plan_state(layout: ActorLayout, config: OptimizerConfig, replicas: int = 1) -> StateLayout:
    """The state layout of what this config trains: nothing is kept for a frozen module. `replicas`: Ranks.replicas."""
    rates = config.module_learning_rates()
    names = [part.name for tensor in layout.tensors.values() for part in tensor.parts]
    counts = tuple((name, math.prod(layout.shards[name].shape)) for name in names if rates[module_of(name)])
    dtype = "float64" if layout.dtype == "float64" else "float32"
    cut = sum(count for name, count in counts if layout.shards[name].axis is not None)
    return StateLayout(counts, config.chunk_elements, dtype, cut * (replicas - 1))


class HeldSlab:
    """A slab mapped writable under an exclusive lease for as long as the run is open."""

    def __init__(self, session: BrokerSession, name: str, size_bytes: int, *, registered: bool = False) -> None:
        """`registered`: host memory that a GPU copies from and to. Raises WrongState when the slab has another size,
        OutOfMemory when it cannot be pinned."""
        self._lease: SlabLease = session.lease(name, LeaseMode.WRITE)
        _check_size(self._lease, size_bytes)
        device = self._lease.slab.device
        self._mapped = MappedSlab(driver_of(device), size_bytes)
        try:
            self._mapped.bind(self._lease, writable=True)
            pinned = registered and is_host(device)
            self._registration = HostRegistration(self._mapped.address, size_bytes) if pinned else None
        except BaseException:
            self._mapped.close()
            self._lease.release()
            raise
        self.bytes = self._mapped.tensor(Placement.contiguous(name, 0, (size_bytes,), "uint8"))
        """uint8 [size_bytes]"""

    def close(self) -> None:
        """Unmaps, then drops the lease; the slab stays with the broker. Views must not be touched any more."""
        if self._registration is not None:
            self._registration.close()
        self._mapped.close()
        self._lease.release()


class VisitingSlab:
    """A device's slab that is there from `back` to `drop`, at addresses that never change. One left by an earlier process is
    taken up as it is."""

    def __init__(self, session: BrokerSession, name: str, object_class: str, size_bytes: int, device: str, run: str) -> None:
        """Raises WrongState when an earlier process left it in another size."""
        self._session, self.name, self._size = session, name, size_bytes
        self._created = {"object_class": object_class, "device": device, "size_bytes": size_bytes, "run": run}
        self._mapped = MappedSlab(driver_of(device), size_bytes)
        self._lease: SlabLease | None = None
        self.bytes = self._mapped.tensor(Placement.contiguous(name, 0, (size_bytes,), "uint8"))
        """uint8 [size_bytes]; touching it is a fault while the slab is away."""
        if any(slab.name == name for slab in session.list_slabs(name)):
            try:
                self._take()
            except BaseException:
                self._mapped.close()
                raise

    @property
    def backed(self) -> bool:
        return self._lease is not None

    def back(self) -> None:
        """New memory of zeros, in the broker's custody. Idempotent. Raises OutOfMemory with the ledger's table."""
        if not self.backed:
            # What a drop that failed has left behind.
            self._delete_left()
            self._session.create(self.name, **self._created)
            self._take()

    def drop(self) -> None:
        """Gives the memory back to the device. Idempotent; after a failure, to be called again."""
        self._leave()
        self._delete_left()

    def close(self) -> None:
        """A slab that is there stays with the broker."""
        self._leave()
        self._mapped.close()

    def _take(self) -> None:
        lease = self._session.lease(self.name, LeaseMode.WRITE)
        _check_size(lease, self._size)
        try:
            self._mapped.bind(lease, writable=True)
        except BaseException:
            lease.release()
            raise
        self._lease = lease

    def _delete_left(self) -> None:
        if any(slab.name == self.name for slab in self._session.list_slabs(self.name)):
            self._session.delete(self.name)

    def _leave(self) -> None:
        self._mapped.unbind()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def slab_sizes(layout: StateLayout) -> dict[str, int]:
    return {"optimizer": layout.size_bytes, "flips": log_bytes(len(layout.chunks)), "gradients": layout.gradient_bytes}


def create_slabs(session: BrokerSession, rank: int, layout: StateLayout, actor: ActorLayout, device: str, run: str,
                 gradients: str = "host", state_device: str = "host") -> None:
    """Zero-filled slabs of a new run: the device's actor and the rank's own, but for gradients that visit the device.
    `state_device`: where master weights and moments lie."""
    session.create(actor_slab(run, device), object_class="actor_snapshot", device=device, size_bytes=actor.size_bytes, run=run)
    for what, size_bytes in slab_sizes(layout).items():
        if what == "gradients" and gradients == "hbm":
            continue
        object_class = "gradients" if what == "gradients" else "optimizer_state"
        session.create(state_slab(run, rank, what), object_class=object_class, size_bytes=size_bytes, run=run,
                       device=state_device if what == "optimizer" else "host")


def _check_size(lease: SlabLease, size_bytes: int) -> None:
    """Raises WrongState, the lease dropped, when the slab has another size."""
    found = lease.slab.size_bytes
    if found != size_bytes:
        name = lease.slab.name
        lease.release()
        raise WrongState(f"slab {name} has {found} bytes; this configuration needs {size_bytes}: it was laid out for "
                         "other trainable parameters, chunk_elements or dtype, or for another mesh.data_parallel",
                         reason="STATE_LAYOUT_MISMATCH")


def delete_earlier(session: BrokerSession, rank: int, size: int) -> None:
    """Deletes the slabs of every earlier run of this rank, its device's actor included; rank 0 those of ranks that a smaller
    group no longer has, too."""
    for slab in session.list_slabs("runs/"):
        if slab.role != "trainer":
            continue
        actor, owner = slab.object_class == "actor_snapshot", slab.name.split("/")[2]
        index = (slab.device if actor else owner).rpartition(":" if actor else "-")[2]
        gone = rank == 0 and (not index.isdigit() or int(index) >= size)
        if gone or index == str(rank):
            session.delete(slab.name)
