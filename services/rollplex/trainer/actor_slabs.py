"""The slabs that a trainer rank writes: its own device's actor, and those of the q - 1 devices that hold the same shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from rollplex.core.ids import actor_slab
from rollplex.core.topology import Topology, torch_device
from rollplex.engine import ActorMapping
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, ModelConfig, load_into
from rollplex.trainer.optimizer_state import OptimizerState


class ActorSlabs:
    """`bind_for_update` and `unbind` are the pair over all of them; `own` alone is read. Owner thread only."""

    def __init__(self, session: BrokerSession, layout: ActorLayout, topology: Topology, rank: int) -> None:
        """`topology`: the mesh's, which names the devices."""
        self._layout = layout
        self._shard, self._part = topology.rollout_shard(rank), topology.part(rank)
        self.device = topology.device_name(rank)
        self.own = ActorMapping(session, layout, self.device)
        self._by_part = {topology.part(peer): self.own if peer == rank else
                         ActorMapping(session, layout, topology.device_name(peer)) for peer in topology.peers(rank)}

    def open(self, run: str) -> None:
        """Chooses the run's slabs; nothing is leased yet."""
        for mapping in self._by_part.values():
            mapping.open(actor_slab(run, mapping.device))

    def bind_for_update(self, update_epoch: int) -> None:
        """WRITE leases on all slabs, beside the other writers of the epoch; all or none."""
        try:
            for mapping in self._by_part.values():
                mapping.bind_for_update(update_epoch)
        except BaseException:
            self.unbind()
            raise

    def unbind(self) -> None:
        """Leaves every slab. Idempotent."""
        for mapping in self._by_part.values():
            mapping.unbind()

    def close(self) -> None:
        for mapping in self._by_part.values():
            mapping.close()

    def views(self) -> dict[str, torch.Tensor]:
        """This rank's parameters in its own device's slab, by training name."""
        return self._layout.training_views(self.own.views(), self._part)

    def shard_views(self) -> dict[str, torch.Tensor]:
        """The device's whole rollout shard, by training name."""
        return self._layout.segment_views(self.own.views())

    def targets(self) -> dict[str, list[torch.Tensor]]:
        """Flat views of this rank's parameters wherever it writes them, in the order in which their bytes lie."""
        by_part = {part: self._layout.training_views(mapping.views(), self._part)
                   for part, mapping in self._by_part.items()}
        return {name: [self._layout.stored(name, by_part[part][name]).view(-1)
                       for part in self._layout.destinations(name, self._part)]
                for name in self._layout.shards}

    def load(self, checkpoint: Path, config: ModelConfig, state: OptimizerState) -> None:
        """Checkpoint -> the device's whole rollout shard, and this rank's master weights at full precision.

        Before the snapshot is registered. Raises BadInput for a checkpoint that does not fit.
        """
        segments = self._layout.segment_views(self.own.views())

        def store(name: str, values: torch.Tensor) -> None:
            segments[name].copy_(values)
            if name in state.layout.spans_of:
                part = self._layout.take_part(name, values, self._part)
                state.set_master(name, self._layout.stored(name, part))

        shards = self._layout.rollout_shards
        # On a GPU the file's own bytes cross the bus, and are converted, cut and sent back to the host state from there.
        device, dtype = torch_device(self.device), getattr(torch, state.layout.dtype)
        views = _OneAtATime({name: shard.shape for name, shard in shards.items()}, dtype, device, store)
        self.own.bind_for_update(None)
        try:
            load_into(checkpoint, config, views, self._shard, self._layout.tp, shards=shards)
            views.flush()
        finally:
            self.own.unbind()
        state.finish_step(0)


class _OneAtATime(Mapping[str, torch.Tensor]):
    """Views for load_into that exist only while they are filled: a whole full-precision copy would double the model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str,
                 store: Callable[[str, torch.Tensor], None]) -> None:
        self._shapes, self._dtype, self._device, self._store = shapes, dtype, device, store
        self._filling: tuple[str, torch.Tensor] | None = None

    def flush(self) -> None:
        """Stores the view that was handed out last."""
        if self._filling is not None:
            self._store(*self._filling)
            self._filling = None

    def __getitem__(self, name: str) -> torch.Tensor:
        self.flush()
        self._filling = (name, torch.empty(self._shapes[name], dtype=self._dtype, device=self._device))
        return self._filling[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
