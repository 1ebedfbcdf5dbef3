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
from rollplex.memory.client import BrokerSession, SlabLease
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.model import ActorLayout, VisionLanguageModel, module_of
from rollplex.trainer.flip_log import FlipLog, log_bytes
from rollplex.trainer.gradients import GradientBuffer
from rollplex.trainer.optimizer_state import OptimizerState, StateLayout


def plan_state(model: VisionLanguageModel, config: OptimizerConfig) -> StateLayout:
    """The state layout of what this config trains: nothing is kept for a frozen module."""
    rates = config.module_learning_rates()
    layout = model.layout
    names = [part.name for tensor in layout.tensors.values() for part in tensor.parts]
    counts = tuple((name, math.prod(model.shards[name].shape)) for name in names if rates[module_of(name)])
    dtype = "float64" if layout.dtype == "float64" else "float32"
    return StateLayout(counts, config.chunk_elements, dtype)


class HeldSlab:
    """A slab mapped writable under an exclusive lease for as long as the run is open."""

    def __init__(self, session: BrokerSession, name: str, size_bytes: int) -> None:
        """Raises WrongState when the slab has another size."""
        self._lease: SlabLease = session.lease(name, LeaseMode.WRITE)
        found = self._lease.slab.size_bytes
        if found != size_bytes:
            self._lease.release()
            raise WrongState(f"slab {name} has {found} bytes; this configuration needs {size_bytes}: it was laid out for "
                             "other trainable parameters, chunk_elements or dtype", reason="STATE_LAYOUT_MISMATCH")
        self._mapped = MappedSlab(driver_of("host"), size_bytes)
        self._mapped.bind(self._lease, writable=True)
        self.bytes = self._mapped.tensor(Placement.contiguous(name, 0, (size_bytes,), "uint8"))
        """uint8 [size_bytes]"""

    def close(self) -> None:
        """Unmaps, then drops the lease; the slab stays with the broker. Views must not be touched any more."""
        self._mapped.close()
        self._lease.release()


class RunState:
    """An open run's optimizer state and gradient buffer."""

    def __init__(self, session: BrokerSession, model: VisionLanguageModel, layout: StateLayout, run: str, *,
                 new: bool) -> None:
        self.layout = layout
        sizes = slab_sizes(layout)
        self._held: list[HeldSlab] = []
        try:
            for what in ("optimizer", "flips", "gradients"):
                self._held.append(HeldSlab(session, state_slab(run, model.tp_rank, what), sizes[what]))
            state, flips, gradients = (held.bytes for held in self._held)
            self.optimizer = OptimizerState(layout, state, FlipLog(flips, len(layout.chunks)), new=new)
            self.gradients = GradientBuffer(layout, gradients, model)
        except BaseException:
            self._release()
            raise
        self.gradients.attach()

    def close(self) -> None:
        self.gradients.detach()
        self._release()

    def _release(self) -> None:
        while self._held:
            self._held.pop().close()


def slab_sizes(layout: StateLayout) -> dict[str, int]:
    return {"optimizer": layout.size_bytes, "flips": log_bytes(len(layout.chunks)), "gradients": layout.gradient_bytes}


def create_slabs(session: BrokerSession, rank: int, layout: StateLayout, actor: ActorLayout, device: str, run: str) -> None:
    """Zero-filled slabs of a new run: the device's actor and the rank's own."""
    session.create(actor_slab(run, device), object_class="actor_snapshot", device=device, size_bytes=actor.size_bytes, run=run)
    for what, size_bytes in slab_sizes(layout).items():
        object_class = "gradients" if what == "gradients" else "optimizer_state"
        session.create(state_slab(run, rank, what), object_class=object_class, size_bytes=size_bytes, run=run)


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
