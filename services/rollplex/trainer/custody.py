"""A trainer rank's slabs at the broker: optimizer state, flip log, gradients. They outlive the process.

A new run: `delete_earlier`, `create_slabs`, RunState(new=True), `load_weights`. After a restart: RunState(new=False) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from rollplex.core.config import OptimizerConfig
from rollplex.core.errors import WrongState
from rollplex.core.ids import state_slab
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.memory.client import BrokerSession, SlabLease
from rollplex.memory.driver import Driver
from rollplex.memory.mapping import MappedSlab
from rollplex.model import ModelConfig, VisionLanguageModel, load_into, module_of
from rollplex.trainer.flip_log import FlipLog, log_bytes
from rollplex.trainer.gradients import GradientBuffer
from rollplex.trainer.optimizer_state import OptimizerState, StateLayout


def plan_state(model: VisionLanguageModel, config: OptimizerConfig) -> StateLayout:
    """The state layout of what this config trains: nothing is kept for a frozen module."""
    rates = config.module_learning_rates()
    layout = model.layout
    names = [part.name for tensor in layout.tensors.values() for part in tensor.parts]
    counts = tuple((name, torch.Size(layout.shards[name].shape).numel()) for name in names if rates[module_of(name)])
    dtype = "float64" if layout.dtype == "float64" else "float32"
    return StateLayout(counts, config.chunk_elements, dtype)


class HeldSlab:
    """A slab mapped writable under an exclusive lease for as long as the run is open."""

    def __init__(self, session: BrokerSession, driver: Driver, name: str, size_bytes: int) -> None:
        """Raises WrongState when the slab has another size."""
        self._lease: SlabLease = session.lease(name, LeaseMode.WRITE)
        found = self._lease.slab.size_bytes
        if found != size_bytes:
            self._lease.release()
            raise WrongState(f"slab {name} has {found} bytes; this configuration needs {size_bytes}: it was laid out for "
                             "other trainable parameters, chunk_elements or dtype", reason="STATE_LAYOUT_MISMATCH")
        self._mapped = MappedSlab(driver, size_bytes)
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
                self._held.append(HeldSlab(session, session.driver, state_slab(run, model.tp_rank, what), sizes[what]))
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


def create_slabs(session: BrokerSession, rank: int, layout: StateLayout, run: str) -> None:
    """Zero-filled slabs of a new run."""
    for what, size_bytes in slab_sizes(layout).items():
        object_class = "gradients" if what == "gradients" else "optimizer_state"
        session.create(state_slab(run, rank, what), object_class=object_class, size_bytes=size_bytes, run=run)


def delete_earlier(session: BrokerSession, rank: int, device: str) -> None:
    """Deletes the slabs of every earlier run of this rank, its device's actor included."""
    for slab in session.list_slabs("runs/"):
        own = f"/trainer-{rank}/" in slab.name
        actor = slab.object_class == "actor_snapshot" and slab.device == device
        if slab.role == "trainer" and (own or actor):
            session.delete(slab.name)


def load_weights(checkpoint: Path, config: ModelConfig, model: VisionLanguageModel, state: OptimizerState,
                 actor_views: Mapping[str, torch.Tensor]) -> None:
    """Checkpoint -> master weights at full precision, and from those the actor in its dtype.

    `actor_views`: by training name, writable. Raises BadInput for a checkpoint that does not fit.
    """
    def store(name: str, values: torch.Tensor) -> None:
        actor_views[name].copy_(values)
        if name in state.layout.spans_of:
            state.set_master(name, values)

    shapes = {name: shard.shape for name, shard in model.layout.shards.items()}
    views = _OneAtATime(shapes, getattr(torch, state.layout.dtype), store)
    load_into(checkpoint, config, views, model.tp_rank, model.tp_size)
    views.flush()
    state.finish_step(0)


class _OneAtATime(Mapping[str, torch.Tensor]):
    """Views for load_into that exist only while they are filled: a whole full-precision copy would double the model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype,
                 store: Callable[[str, torch.Tensor], None]) -> None:
        self._shapes, self._dtype, self._store = shapes, dtype, store
        self._filling: tuple[str, torch.Tensor] | None = None

    def flush(self) -> None:
        """Stores the view that was handed out last."""
        if self._filling is not None:
            self._store(*self._filling)
            self._filling = None

    def __getitem__(self, name: str) -> torch.Tensor:
        self.flush()
        self._filling = (name, torch.empty(self._shapes[name], dtype=self._dtype))
        return self._filling[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
