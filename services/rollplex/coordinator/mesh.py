"""The engines and the broker together: joining, opening runs, binding snapshots, entering phases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollplex.coordinator import orders
from rollplex.coordinator.agreement import check_one_actor
from rollplex.coordinator.compatibility import Admission
from rollplex.coordinator.peers import EngineGroup, Place, together
from rollplex.coordinator.planner import IterationNeeds, Planner, engine_choices
from rollplex.coordinator.ranks import Outcome
from rollplex.coordinator.records import Run
from rollplex.core.checkpoints import Checkpoint
from rollplex.core.config import MeshSection, RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import InternalError
from rollplex.core.ids import actor_slab, state_slab
from rollplex.core.phases import Phase
from rollplex.core.residency import RUNTIME
from rollplex.core.work import BindResult, MediaItem, UpdateOrder
from rollplex.memory.client import BrokerSession
from rollplex.v1 import reference_service_pb2_grpc, rollout_service_pb2_grpc, trainer_service_pb2_grpc
from rollplex.v1.phase_service_pb2 import JoinResponse

T = TypeVar("T")
NOTHING = IterationNeeds()


class Mesh:
    """All peers of the coordinator but the rewards."""

    def __init__(self, mesh: MeshSection, session: BrokerSession, planner: Planner | None = None,
                 admission: Admission | None = None) -> None:
        """Without a `planner` the broker is not told what phases need, and checks what is held alone."""
        def addresses(role: str) -> dict[str, str]:
            return {f"{role}-{index}": mesh.address(f"{role}-{index}") for index in range(mesh.ranks(role))}

        self.topology, self._broker_address = mesh.topology, mesh.address("broker")
        self.admission, self._admitted_broker = admission or Admission({}), 0
        self.phase = Phase.IDLE
        """The one that was entered last."""
        self.trainer = EngineGroup("trainer", addresses("trainer"), trainer_service_pb2_grpc.TrainerServiceStub,
                                   mesh.replicas("trainer"))
        self.reference = EngineGroup("reference", addresses("reference"),
                                     reference_service_pb2_grpc.ReferenceServiceStub, mesh.replicas("reference"))
        self.rollouts = [EngineGroup("rollout", {name: address}, rollout_service_pb2_grpc.RolloutServiceStub)
                         for name, address in addresses("rollout").items()]
        for group in self.groups:
            group.admit = self.admission.admit
        self._session, self._planner = session, planner
        self._bound: dict[str, BindResult] = {}
        """What each rank has bound, by service name."""
        self.broker_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="broker-calls")

    @property
    def groups(self) -> list[EngineGroup]:
        return [self.trainer, self.reference, *self.rollouts]

    def joined(self, name: str) -> JoinResponse | None:
        """What an engine said when it last joined; None for a service that never did."""
        return next((rank.joined for group in self.groups for rank in group.ranks if rank.name == name), None)

    def used_groups(self, with_reference: bool) -> list[EngineGroup]:
        """The groups that an iteration needs; without KL there is no reference work at all."""
        return [group for group in self.groups if with_reference or group is not self.reference]

    async def broker(self, call: Callable[[BrokerSession], T]) -> T:
        """Runs a blocking broker call off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.broker_thread, call, self._session)

    def needs(self, config: RunConfig, prompt_tokens: Sequence[int], *, generates: bool, trains: bool,
              response_tokens: int = 0, media: Sequence[Sequence[MediaItem]] = ()) -> IterationNeeds:
        """Of an iteration, as Planner.needs; after every group it uses has joined."""
        if self._planner is None or not prompt_tokens:
            return IterationNeeds()
        choices = engine_choices(state for group in self.groups for state in group.states)
        return self._planner.needs(config, prompt_tokens, choices, generates=generates, trains=trains,
                                   response_tokens=response_tokens, media=media)

    async def unexplained(self, run: str) -> dict[str, int]:
        """Phase -> the most that a device has held beyond the ledger as that phase ended; empty without GPUs."""
        ledger = await self.broker(lambda session: session.ledger(run))
        found: dict[str, int] = {}
        for row in ledger.peaks:
            if row.object_class == RUNTIME:
                found[row.phase] = max(found.get(row.phase, 0), row.size_bytes)
        return found

    async def enter_phase(self, run: str, iteration: int, phase: Phase, needs: IterationNeeds = NOTHING) -> None:
        """Declares a phase and what it needs. Raises InternalError for bytes that the contract forbids in the one that ended,
        or that an engine still has and may not have in this one; OutOfMemory when this one has no room."""
        violations = await self.broker(lambda session: session.enter_phase(
            run, iteration, phase, needs.planned(phase), needs.relaxed))
        self.phase = phase
        crash_point("coordinator.phase.entered")
        if violations:
            raise InternalError("the residency contract is violated: " + "; ".join(violations),
                                reason="RESIDENCY_VIOLATED")

    async def join(self, with_reference: bool) -> None:
        """Every group that an iteration needs is there and holds the same model."""
        for group in self.used_groups(with_reference):
            await group.ensure_joined()
        await self.check_fits(self.used_groups(with_reference))

    async def open_run(self, run: Run, timeout_s: float, with_reference: bool, restore: Checkpoint | None = None) -> None:
        """Starts a run: the trainer makes snapshot 0 from the model's checkpoint, or what `restore` holds, and the others open
        it. After `join`."""
        place = Place(run.name, -1, -1, timeout_s, self.phase)
        self._bound.clear()
        await self._leave_former_run(place)
        opened = await self.trainer.command(orders.open_run(run.config_json, attach=False), place)
        run.snapshot = opened[0].value.snapshot
        if restore is not None:
            manifest = restore.manifest
            await self.trainer.command(orders.restore_checkpoint(
                str(restore.path), manifest.optimizer_step, manifest.layout_digest), place)
            run.snapshot = manifest.snapshot
        await self.register_snapshot(run)
        await together(*(
            group.command(orders.open_run(run.config_json, attach=False), place)
            for group in self.used_groups(with_reference) if group is not self.trainer))
        await self.admission.run_opened(run.name, self.trainer.ranks[0])
        await together(*(self._bind(group, run, timeout_s) for group in self.used_groups(with_reference)))

    async def _leave_former_run(self, place: Place) -> None:
        """Nobody may map the slabs that the trainer gives back when it opens another run."""
        busy = [group for group in self.groups if any(state.open_run for state in group.states)]
        for group in busy:
            await group.ensure_joined()
        await self.quiesce(busy, place, leave_snapshot=True)

    async def ensure_ready(self, run: Run, timeout_s: float, with_reference: bool) -> None:
        """Between iterations: every group joined, the run open in each (replaced processes attach), snapshot bound."""
        await self.join(with_reference)
        await self.register_snapshot(run)
        for group in self.used_groups(with_reference):
            await self.ready(group, run, timeout_s)

    async def ready(self, group: EngineGroup, run: Run, timeout_s: float) -> list[Outcome]:
        """The group joined, the run open in it, the registered snapshot bound: what the bind answered, by rank. In a replaced
        process nothing else is left, and of the gradients that its trainer summed nothing counts."""
        if await group.ensure_joined():
            for rank in group.ranks:
                self._bound.pop(rank.name, None)
        await self.check_fits([self.trainer, group], run.name)
        if any(state.open_run != run.name for state in group.states):
            await self.attach(group, run, timeout_s)
            if group is self.trainer:
                await self.drop_gradients(run, timeout_s)
        return await self._bind(group, run, timeout_s)

    async def register_snapshot(self, run: Run) -> None:
        """Every device's slab is part of the actor: a snapshot is visible whole or not at all."""
        slabs = [actor_slab(run.name, self.topology.device_name(device)) for device in range(self.topology.train_tp)]
        await self.broker(lambda session: session.register_snapshot(run.name, slabs, run.snapshot))

    async def holds(self, run: Run) -> bool:
        """Whether the broker still has what the run cannot do without: the actor and the training state of every rank."""
        there = await self.broker(lambda session: {slab.name for slab in session.list_slabs(f"runs/{run.name}/")})
        ranks = range(self.topology.train_tp)
        needed = {actor_slab(run.name, self.topology.device_name(rank)) for rank in ranks}
        return there >= needed | {state_slab(run.name, rank, what) for rank in ranks for what in ("optimizer", "flips")}

    async def attach(self, group: EngineGroup, run: Run, timeout_s: float) -> None:
        """Has a replaced group re-import the run's slabs."""
        await group.command(orders.open_run(run.config_json, attach=True),
                            self._place(run, timeout_s))

    async def drop_gradients(self, run: Run, timeout_s: float) -> None:
        """Zeroes what an iteration that broke off has left in the trainer's gradient slabs."""
        order = UpdateOrder(0, 1.0, 0.0, run.optimizer_step + 1, skip=True)
        await self.trainer.command(orders.apply_update(order), self._place(run, timeout_s))

    async def _bind(self, group: EngineGroup, run: Run, timeout_s: float) -> list[Outcome]:
        """The group leases the run's snapshot; a replica on devices of its own copies it there first. On each device all must
        have bound one file, and no other device's."""
        outcomes = await group.command(orders.bind_snapshot(), self._place(run, timeout_s))
        for rank, outcome in zip(group.ranks, outcomes):
            rank.joined.bound_snapshot = run.snapshot
            self._bound[rank.name] = outcome.value
        crash_point("coordinator.bind.done")
        ablation = json.loads(run.config_json or "{}").get("ablation", {})
        check_one_actor(self.topology, self._bound, shared=not ablation.get("no_weight_sharing"))
        return outcomes

    def _place(self, run: Run, timeout_s: float) -> Place:
        return Place(run.name, -1, run.snapshot, timeout_s, self.phase)

    async def quiesce(self, groups: Sequence[EngineGroup], place: Place, *, leave_snapshot: bool) -> None:
        await together(*(
            group.command(orders.quiesce(leave_snapshot=leave_snapshot), place)
            for group in groups))

    async def let_go(self, group: EngineGroup, place: Place, *, leave_snapshot: bool) -> None:
        """As `quiesce`, of a group that may have broken off meanwhile; one that was replaced has nothing to leave."""
        await group.ensure_joined()
        await self.quiesce([group], place, leave_snapshot=leave_snapshot)

    async def check_fits(self, groups: Sequence[EngineGroup], run: str = "") -> None:
        """Raises WrongState, with what differs, unless those that have joined hold one model, and that of the run's slabs, and
        the broker is of this coordinator's protocol and configuration."""
        await self.admission.same_layout([rank for group in groups for rank in group.ranks], run)
        generation = self._session.generation
        if generation != self._admitted_broker:
            await self.admission.admit_address("broker", self._broker_address)
            self._admitted_broker = generation

    async def close(self) -> None:
        for group in self.groups:
            await group.close()
        self.broker_thread.shutdown()
