"""A whole mesh in one process: real broker, coordinator, intake, journal and chassis; engines that answer at once.

For what concerns the coordinator alone: order, barriers, failures, overhead. `python -m` services are tested in tests/e2e.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollplex.broker.config import BrokerConfig, BrokerSection
from rollplex.broker.server import Broker, add_broker
from rollplex.coordinator.config import CoordinatorConfig
from rollplex.coordinator.engine import Coordinator
from rollplex.coordinator.records import RewardRegistration
from rollplex.coordinator.server import build
from rollplex.core import work
from rollplex.core.compatibility import digest
from rollplex.core.config import MeshSection, ModelSection, RunConfig
from rollplex.core.errors import NotFound, as_domain_error
from rollplex.core.ids import actor_slab, state_slab
from rollplex.data.rows import PromptRow
from rollplex.memory.client import BrokerSession
from rollplex.reference.servicer import add_reference
from rollplex.rollout.servicer import add_rollout
from rollplex.rpc.engine_server import start_engine
from rollplex.rpc.server import RunningServer, start_server
from rollplex.trainer.servicer import add_trainer
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc

ACTOR_BYTES = 4096


@dataclass
class StubCommunicator:
    """Notes the epochs that its engine was to join."""

    announced: list[int] = field(default_factory=list)

    def announce(self, epoch: int) -> None:
        self.announced.append(epoch)

    def enter(self, epoch: int) -> None:
        """There is nobody to meet."""


@dataclass
class Stub:
    """What the three stub engines share. `hooks` run on the owner thread before a method's answer."""

    role: str
    mesh: MeshSection
    rank: int = 0
    """A replica's number for rollout."""
    tensor_parallel_size: int = 1
    devices: tuple[int, ...] = ()
    layout_facts: dict[str, str] = field(default_factory=lambda: {"slab.dtype": "float32"})
    open_run_name: str = ""
    bound_snapshot: int = -1
    calls: list[str] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)
    """Indices of the groups of every `score_suffix`."""
    prepared: list[list[int]] = field(default_factory=list)
    """And of every `materialize_prefix`."""
    hooks: dict[str, Callable[[work.WorkContext], None]] = field(default_factory=dict)
    session: BrokerSession | None = None
    communicator: StubCommunicator = field(default_factory=StubCommunicator)
    killed: threading.Event = field(default_factory=threading.Event)
    """A process takes its threads along; what waits in here has to end itself."""

    @property
    def layout_hash(self) -> str:
        return digest(self.layout_facts)

    def __post_init__(self) -> None:
        """For what a role keeps beside the above."""

    def _enter(self, name: str, context: work.WorkContext) -> None:
        self.calls.append(name)
        if name in self.hooks:
            self.hooks[name](context)
        context.check()

    def open_run(self, context, run, snapshot, config: RunConfig, attach) -> work.OpenRunResult:
        self._enter("attach" if attach else "open_run", context)
        self.open_run_name = run
        slab = ""
        if self.role == "trainer" and not attach:
            self.session = self.session or BrokerSession.connect(
                self.mesh.address("broker"), self.mesh.handle_socket, process=f"trainer-{self.rank}", role="trainer")
            device = f"host:{self.rank}"
            slab = actor_slab(run, device)
            for old in self.session.list_slabs("runs/"):
                if old.role == "trainer" and old.name.split("/")[2:] in (["actor", device], [f"trainer-{self.rank}", "optimizer"],
                                                                         [f"trainer-{self.rank}", "flips"]):
                    self.session.delete(old.name)
            self.session.create(slab, object_class="actor_snapshot", device=device, size_bytes=ACTOR_BYTES, run=run)
            for what in ("optimizer", "flips"):
                self.session.create(state_slab(run, self.rank, what), object_class="optimizer_state", size_bytes=64, run=run,
                                    device="host")
        return work.OpenRunResult(slab, ACTOR_BYTES, max(snapshot, 0), 1)

    def bind_snapshot(self, context, snapshot) -> work.BindResult:
        self._enter("bind_snapshot", context)
        self.bound_snapshot = snapshot
        return work.BindResult(snapshot, 1, {f"host:{device}": 7 + device for device in self.devices})

    def quiesce(self, context, leave_snapshot) -> work.QuiesceResult:
        self._enter("leave_snapshot" if leave_snapshot else "quiesce", context)
        if leave_snapshot:
            self.bound_snapshot = -1
        return work.QuiesceResult(0)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class StubRollout(Stub):
    """Answers `respond(group_index, sample_index)` token ids for every sample, at once."""

    groups: Sequence[work.PreparedGroup] = ()
    """What it generated last."""

    respond: Callable[[int, int], list[int]] = staticmethod(lambda group, sample: [5 + sample % 3, 6, 7])
    last_token_gate: threading.Event | None = None
    """When set, the last sample is held back until the event is."""

    def generate(self, context, groups, sampling, *, snapshot, iteration) -> work.GenerateResult:
        self._enter("generate", context)
        self.groups = groups
        finished = []
        for group in groups:
            for index in range(group.sample_count):
                ids = array("q", self.respond(group.group_index, index))
                finished.append(work.FinishedSample(group.group_index, index, ids, array("f", [-1.0] * len(ids)), "stop"))
        context.samples(finished[:-1])
        while self.last_token_gate is not None and not self.last_token_gate.wait(0.01) and not self.killed.is_set():
            context.check()
        context.samples(finished[-1:])
        return work.GenerateResult(sum(len(group.token_ids) for group in groups), 3 * len(finished), 0.25, 0.5,
                                   tuple(group.prompt_hash for group in groups), decode_steps=2, decode_rows=2 * len(finished))


class StubScorer(Stub):
    """What reference and trainer both answer."""

    def materialize_prefix(self, context, groups) -> work.PrefixResult:
        self.prepared.append([group.group_index for group in groups])
        self._enter("materialize_prefix", context)
        return work.PrefixResult(tuple(group.prompt_hash for group in groups), 0, 0)

    def score_suffix(self, context, groups, *, temperature, keep_boundaries) -> work.ScoreResult:
        self._enter("score_suffix", context)
        self.scored.append([group.group_index for group in groups])
        return work.ScoreResult(tuple(
            work.SampleLogprobs(group.group_index, sample.sample_index, array("f", [-1.0] * len(sample.token_ids)))
            for group in groups for sample in group.samples))


class StubTrainer(StubScorer):
    """Keeps what it was told to train on; `grad_norms` are answered one an update, then 1.0."""

    def __post_init__(self) -> None:
        self.trained: list[tuple[Sequence[work.ResponseGroup], work.LossScale]] = []
        self.orders: list[work.UpdateOrder] = []
        self.grad_norms: list[float] = []
        self.writing: tuple[str, Future] | None = None
        self.restored: list[tuple[Path, int, str]] = []

    def require(self, run, snapshot) -> None:
        """The stub serves whatever it is asked."""

    def train_suffix(self, context, groups, scale) -> work.SuffixResult:
        self._enter("train_suffix", context)
        self.trained.append((groups, scale))
        return work.SuffixResult({"actor/pg_loss": 0.25})

    def measure_gradient(self, context) -> work.GradientResult:
        self._enter("measure_gradient", context)
        norm = self.grad_norms.pop(0) if self.grad_norms else 1.0
        return work.GradientResult(norm, norm == norm and abs(norm) != float("inf"))

    def apply_update(self, context, order) -> work.UpdateResult:
        self._enter("skip_update" if order.skip else "apply_update", context)
        self.orders.append(order)
        return work.UpdateResult(1, 0, 0)

    def export_checkpoint(self, context, path) -> work.CheckpointResult:
        self._enter("export_checkpoint", context)
        return work.CheckpointResult(str(path), 1)

    @property
    def durable(self) -> StubTrainer:
        return self

    def write_checkpoint(self, context, path) -> work.CheckpointResult:
        """Hook `write_part` runs on a thread of its own, as the writer would, with the path as its context."""
        self._enter("write_checkpoint", context)
        self.writing = str(path), Future()
        threading.Thread(target=self._write_part, args=(path, self.writing[1]), daemon=True).start()
        return work.CheckpointResult(str(path), 1)

    def _write_part(self, path, future) -> None:
        try:
            if "write_part" in self.hooks:
                self.hooks["write_part"](path)
            (path / f"part-{self.rank}").write_bytes(b"state")
        except Exception as error:  # noqa: BLE001 - raised again at whoever waits
            future.set_exception(as_domain_error(error))
        else:
            future.set_result(work.WrittenPart(5, "digest", "float32", "float32"))

    def outcome(self, path) -> Future:
        if self.writing is None or self.writing[0] != path:
            raise NotFound("not here", reason="CHECKPOINT_NOT_FOUND")
        return self.writing[1]

    def restore_checkpoint(self, context, path, optimizer_step, layout_digest) -> work.CheckpointResult:
        self._enter("restore_checkpoint", context)
        self.restored.append((path, optimizer_step, layout_digest))
        return work.CheckpointResult(str(path), 1)


class StubReward(reward_service_pb2_grpc.RewardServiceServicer):
    """Scores by `value(item)`: a float, or None for unscored."""

    def __init__(self) -> None:
        self.value: Callable[[Any], float | None] = lambda item: float(item.sample_index % 2)
        self.requests = 0

    async def DescribeReward(self, request, context):
        return reward_service_pb2.DescribeRewardResponse(name="stub")

    async def Score(self, request, context):
        self.requests += 1
        values = [self.value(item) for item in request.items]
        return reward_service_pb2.ScoreResponse(scores=[
            reward_service_pb2.Score(value=value, parts={"accuracy": value or 0.0}) if value is not None
            else reward_service_pb2.Score(error="no idea") for value in values])


ROLES = {"rollout": (StubRollout, add_rollout), "reference": (StubScorer, add_reference),
         "trainer": (StubTrainer, add_trainer)}


@dataclass
class StubMesh:
    coordinator: Coordinator
    mesh: MeshSection
    rollouts: list[StubRollout]
    references: list[StubScorer]
    trainers: list[StubTrainer]
    reward: StubReward
    restart: Callable
    """Closes the coordinator and builds another one on the same journal."""
    kill: Callable
    """(service name): its connections break and it serves no more."""
    replace: Callable
    """(service name): another process of that name serves, which knows of nothing; `changes` of its fields. Returns
    its engine."""

    @property
    def rollout(self) -> StubRollout:
        return self.rollouts[0]

    @property
    def reference(self) -> StubScorer:
        return self.references[0]

    @property
    def trainer(self) -> StubTrainer:
        return self.trainers[0]

    async def finished(self, key, timeout_s: float = 20.0, after: int = 0):
        """The iteration once it has ended; `after`: the event before it was submitted, for one that was there already."""
        deadline = time.monotonic() + timeout_s
        async for event in self.coordinator.watch(key.run, after):
            assert time.monotonic() < deadline, "the iteration did not end"
            body = event.body
            if getattr(body, "iteration", None) and body.iteration["key"] == {
                    "run": key.run, "iteration": key.iteration, "validation": key.validation} and body.iteration["end_time_s"]:
                return await self.coordinator.iteration(key)
        raise AssertionError("the watch ended")


@asynccontextmanager
async def stub_mesh(runtime_dir: Path, checkpoint: Path, config: CoordinatorConfig | None = None, *,
                    host_limit_bytes: int = 0, **sizes: int):
    """Starts everything, the stub reward registered as "stub". `sizes`: more of [mesh], as train_tensor_parallel."""
    mesh = MeshSection(runtime_dir=runtime_dir, drain_timeout_s=0.2, **sizes)
    model = ModelSection(checkpoint=checkpoint)
    config = config or CoordinatorConfig(builtin_reward="")
    broker = Broker(BrokerConfig(mesh=mesh, broker=BrokerSection(keeper=False, host_limit_bytes=host_limit_bytes)))
    servers = [await start_server("broker", mesh.address("broker"), lambda server: add_broker(broker.custody, server))]
    await broker.start()
    await servers[0].ready()
    engines: dict[str, Stub] = {}
    running: dict[str, RunningServer] = {}

    async def start(role: str, index: int, **changes) -> None:
        name, (kind, add) = f"{role}-{index}", ROLES[role]
        devices = mesh.topology.replica_devices(index) if role == "rollout" else (index,)
        ranks = 1 if role == "rollout" else mesh.ranks(role)
        engines[name] = kind(role, mesh, rank=index, tensor_parallel_size=ranks, devices=devices, **changes)
        running[name] = await start_engine(name, mesh.address(name), engines[name], add)

    async def kill(name: str) -> None:
        await running.pop(name).drain(0)
        engines[name].killed.set()

    async def replace(name: str, **changes) -> Stub:
        role, _, index = name.rpartition("-")
        before = engines[name]
        await start(role, int(index), **changes)
        engines[name].session = before.session
        result.__dict__[f"{role}s"][int(index)] = engines[name]
        return engines[name]

    for role in ROLES:
        for index in range(mesh.ranks(role)):
            await start(role, index)
    reward = StubReward()

    def add_reward(server):
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(reward, server)
        return ["rollplex.v1.RewardService"]

    servers.append(await start_server("reward", mesh.address("reward"), add_reward))
    await servers[-1].ready()
    current = {}

    async def start_coordinator() -> Coordinator:
        if current:
            await current["close"]()
        current["coordinator"], current["close"] = await build(mesh, model, config)
        await current["coordinator"].start()
        return current["coordinator"]

    async def restart() -> None:
        result.coordinator = await start_coordinator()

    by_role = [[engine for engine in engines.values() if engine.role == role] for role in ROLES]
    result = StubMesh(await start_coordinator(), mesh, *by_role, reward, restart, kill, replace)
    await result.coordinator.rewards.register(RewardRegistration("stub", mesh.address("reward")))
    try:
        yield result
    finally:
        await current["close"]()
        for engine in engines.values():
            await asyncio.to_thread(engine.close)  # the broker answers on this loop
        for server in [*running.values(), *reversed(servers)]:
            await server.drain(0.1)
        await broker.close()


def text_rows(count: int) -> list[PromptRow]:
    """Prompts without media."""
    return [PromptRow(index, [{"role": "user", "content": [{"type": "text", "text": f"Which direction, number {index}?"}]}],
                      ground_truth="A", problem_type="multiple choice") for index in range(count)]
