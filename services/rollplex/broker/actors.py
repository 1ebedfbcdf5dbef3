"""The actors of the runs: which slabs are a snapshot, in which state, and who may lease them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollplex.core.errors import AlreadyExists, BadInput, Forbidden, NotFound, WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.snapshots import Snapshot, SnapshotState


@dataclass(frozen=True, slots=True)
class Actor:
    run: str
    slabs: tuple[str, ...]
    snapshot: Snapshot
    writers: frozenset[str] = frozenset()
    """Process names of the open update; empty while VALID."""

    def admit(self, mode: LeaseMode, process: str, snapshot: int | None, update_epoch: int | None) -> None:
        """READ only of the asked number while VALID; WRITE only under the open epoch, by its writers."""
        state = self.snapshot
        if mode is LeaseMode.READ:
            if snapshot is None:
                raise BadInput(f"a READ lease on run {self.run}'s actor must name the snapshot it expects",
                               reason="SNAPSHOT_REQUIRED")
            if not state.readable:
                raise WrongState(f"snapshot {state.number} of run {self.run} is being replaced; wait for "
                                 f"{state.number + 1}", reason="SNAPSHOT_TORN", snapshot=state.number)
            if snapshot != state.number:
                raise WrongState(f"run {self.run} holds snapshot {state.number}, not {snapshot}",
                                 reason="STALE_SNAPSHOT", snapshot=state.number, expected=snapshot)
            return
        if state.readable:
            raise WrongState(f"no update of run {self.run} is open", reason="NO_UPDATE_OPEN", snapshot=state.number)
        if update_epoch != state.update_epoch:
            raise WrongState(f"update epoch {update_epoch} is not the open one, {state.update_epoch}",
                             reason="STALE_EPOCH", update_epoch=state.update_epoch)
        if process not in self.writers:
            raise Forbidden(f"{process} is not among the update's writers: {', '.join(sorted(self.writers))}",
                            reason="NOT_A_WRITER")

    def tolerates(self, process: str, mode: LeaseMode) -> bool:
        """Whether a lease held by `process` may stay beside the writers: a writer's own READ lease may."""
        return mode is LeaseMode.READ and process in self.writers


@dataclass(slots=True)
class ActorTable:
    by_run: dict[str, Actor] = field(default_factory=dict)

    def get(self, run: str) -> Actor:
        actor = self.by_run.get(run)
        if actor is None:
            raise NotFound(f"run {run!r} has no registered snapshot", reason="SNAPSHOT_NOT_FOUND", run=run)
        return actor

    def of_slab(self, slab: str) -> Actor | None:
        return next((actor for actor in self.by_run.values() if slab in actor.slabs), None)

    def register(self, run: str, slabs: tuple[str, ...], number: int) -> Actor:
        """VALID(number). The same registration again changes nothing. Raises WrongState or AlreadyExists otherwise."""
        if not run or not slabs or number < 0:
            raise BadInput(f"run {run!r} with {len(slabs)} slabs at snapshot {number}: a run, a slab and a number from "
                           "0 are needed", reason="BAD_SNAPSHOT")
        for slab in slabs:
            other = self.of_slab(slab)
            if other is not None and other.run != run:
                raise AlreadyExists(f"slab {slab} is run {other.run}'s actor", reason="SLAB_REGISTERED")
        known = self.by_run.get(run)
        if known is None:
            self.by_run[run] = Actor(run, slabs, Snapshot(number))
        elif known.snapshot.state is SnapshotState.TORN:
            raise WrongState(f"snapshot {known.snapshot.number} of run {run} is being replaced",
                             reason="SNAPSHOT_TORN", snapshot=known.snapshot.number)
        elif (known.slabs, known.snapshot.number) != (slabs, number):
            raise AlreadyExists(f"run {run} is registered at snapshot {known.snapshot.number} in "
                                f"{', '.join(known.slabs)}", reason="SNAPSHOT_REGISTERED")
        return self.by_run[run]

    def begin_update(self, run: str, number: int, writers: frozenset[str]) -> Actor:
        """TORN under the next epoch."""
        actor = self.get(run)
        snapshot = actor.snapshot.begin_update(number, actor.snapshot.update_epoch + 1)
        self.by_run[run] = replace(actor, snapshot=snapshot, writers=writers)
        return self.by_run[run]

    def published(self, run: str, number: int, update_epoch: int) -> bool:
        """Whether exactly this publication has happened already."""
        snapshot = self.get(run).snapshot
        return update_epoch > 0 and snapshot == Snapshot(number, SnapshotState.VALID, update_epoch)

    def publish(self, run: str, number: int, update_epoch: int) -> Actor:
        actor = self.get(run)
        self.by_run[run] = replace(actor, snapshot=actor.snapshot.publish(number, update_epoch), writers=frozenset())
        return self.by_run[run]

    def forget_slab(self, slab: str) -> Actor | None:
        """A snapshot that lacks a slab is none: drops the actor that `slab` belongs to."""
        actor = self.of_slab(slab)
        return self.by_run.pop(actor.run) if actor else None
