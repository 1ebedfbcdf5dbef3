"""Rollout on devices of its own (schedule `disaggregated`), or sharing none of the trainer's weights on the same device (ablation
`no_weight_sharing`): the snapshot copied there, shard by shard, after each update.

A replica's copy is an actor of its own to the broker, with the same states: VALID(k) is read, TORN while it is overwritten, so
what decodes (this process or its workers) never sees a half of k + 1, and a copy that broke off is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.core import work
from rollplex.core.errors import NotFound, WrongState
from rollplex.core.ids import actor_slab, copy_name
from rollplex.core.leases import LeaseMode
from rollplex.core.snapshots import SnapshotState
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab

OBJECT_CLASS = "actor_snapshot"
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """Where a shard comes from and goes to, as devices."""

    source: str
    target: str


class SnapshotCopies:
    """`open` a run; then `bring` before each bind. Owner thread only."""

    def __init__(self, session: BrokerSession, shards: Sequence[ShardCopy]) -> None:
        self._session, self._shards = session, tuple(shards)
        self.elsewhere = all(shard.source != shard.target for shard in self._shards)
        """On devices that the trainer has nothing on."""
        self.opened = False
        """Whether the run's snapshot is to be copied."""
        self._run, self._name = "", ""

    def open(self, run: str, *, wanted: bool = True) -> str:
        """Chooses the run, whose snapshot is copied if `wanted`; copies of earlier ones on these devices are deleted. Nothing may
        be bound there. Returns the run under which the slabs to bind are found."""
        self._run, self._name, self.opened = run, copy_name(run, self._session.process), wanted
        kept, devices = set(self._targets) if wanted else set(), {shard.target for shard in self._shards}
        for slab in self._session.list_slabs("runs/"):
            own = slab.object_class == OBJECT_CLASS and slab.role == self._session.role
            if own and slab.device in devices and slab.name not in kept:
                self._session.delete(slab.name)
        return self._place if wanted else run

    @property
    def _place(self) -> str:
        """Beside the trainer's slabs a copy needs names of its own."""
        return self._run if self.elsewhere else self._name

    def bring(self, context: work.WorkContext, snapshot: int) -> int:
        """Makes the copy VALID at `snapshot`; bytes that were copied, 0 when it was. Nothing may be bound there.

        Raises WrongState while the trainer's actor is not at `snapshot`.
        """
        if not self._run:
            raise WrongState("no run is open", reason="NO_RUN")
        held = self._held()
        if held is not None and held == (SnapshotState.VALID, snapshot):
            return 0
        if held is not None and held[1] + 1 == snapshot:
            epoch = self._session.begin_update(self._name, held[1], [self._session.process])
            copied = self._copy(context, snapshot, epoch)
            self._session.publish_snapshot(self._name, epoch, snapshot)
            return copied
        # No copy, or one of another past: made from nothing, and registered when it is whole.
        self._create()
        copied = self._copy(context, snapshot, None)
        self._session.register_snapshot(self._name, self._targets, snapshot)
        return copied

    @property
    def _targets(self) -> list[str]:
        return [actor_slab(self._place, shard.target) for shard in self._shards]

    def _held(self) -> tuple[SnapshotState, int] | None:
        try:
            found = self._session.get_snapshot(self._name)
        except NotFound:
            return None
        return SnapshotState(found.state), found.snapshot

    def _create(self) -> None:
        kept = {slab.name for slab in self._session.list_slabs(f"runs/{self._place}/")}
        for shard, name in zip(self._shards, self._targets):
            if name in kept:
                self._session.delete(name)
            source = actor_slab(self._run, shard.source)
            sizes = [slab.size_bytes for slab in self._session.list_slabs(source) if slab.name == source]
            if not sizes:
                raise NotFound(f"the trainer has no slab {source} to copy from", reason="SLAB_NOT_FOUND", slab=source)
            self._session.create(name, object_class=OBJECT_CLASS, device=shard.target, size_bytes=sizes[0], run=self._run)

    def _copy(self, context: work.WorkContext, snapshot: int, update_epoch: int | None) -> int:
        copied = 0
        for shard, name in zip(self._shards, self._targets):
            with (self._session.lease(actor_slab(self._run, shard.source), LeaseMode.READ, snapshot=snapshot) as source,
                  self._session.lease(name, LeaseMode.WRITE, update_epoch=update_epoch) as target):
                size_bytes = source.slab.size_bytes
                mapped = [MappedSlab(driver_of(lease.slab.device), size_bytes) for lease in (source, target)]
                try:
                    mapped[0].bind(source)
                    mapped[1].bind(target, writable=True)
                    for start in range(0, size_bytes, PIECE_BYTES):
                        context.check()
                        mapped[1].copy_from(mapped[0], start, min(start + PIECE_BYTES, size_bytes))
                finally:
                    for mapping in mapped:
                        mapping.close()
                copied += size_bytes
        return copied
