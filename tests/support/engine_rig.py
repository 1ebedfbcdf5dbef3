"""A broker process, an engine served from this process over its Unix socket, and the coordinator's and trainer's part."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from rollplex.core import ids, work
from rollplex.core.config import MeshSection
from rollplex.core.errors import RollplexError, Unavailable
from rollplex.core.topology import Topology
from rollplex.engine.actor import ActorMapping
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, load_into, read_model_config
from rollplex.rpc.channel import sync_channel
from rollplex.rpc.convert import from_proto
from rollplex.rpc.engine_server import start_engine
from rollplex.rpc.status import error_from_rpc, from_detail
from rollplex.v1 import phase_service_pb2 as phase_pb
from rollplex.v1 import phase_service_pb2_grpc as phase_grpc
from rollplex.v1 import types_pb2

RUN = "contract"


@contextmanager
def broker(mesh: MeshSection) -> Iterator[None]:
    """`python -m rollplex.broker` until the end of the context."""
    log = mesh.runtime_dir / "broker.log"
    mesh.runtime_dir.mkdir(mode=0o700, exist_ok=True)
    overrides = [f"mesh.runtime_dir={mesh.runtime_dir}", f"mesh.devices={mesh.devices}",
                 f"mesh.hbm_budget_gib={mesh.hbm_budget_gib}", "broker.keeper=false"]
    command = [sys.executable, "-m", "rollplex.broker", *(part for item in overrides for part in ("--set", item))]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def connect(mesh: MeshSection, process: str, role: str) -> BrokerSession:
    deadline = time.monotonic() + 30
    while True:
        try:
            return BrokerSession.connect(mesh.address("broker"), mesh.handle_socket, process=process, role=role)
        except Unavailable:
            if time.monotonic() > deadline:
                raise


class Loop:
    """An event loop on a thread of its own, so that tests stay plain functions."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@dataclass
class Outcome:
    """What watching a command brought."""

    kinds: list[str] = field(default_factory=list)
    batches: list[list[work.FinishedSample]] = field(default_factory=list)
    result: Any = None
    error: RollplexError | None = None

    @property
    def samples(self) -> dict[tuple[int, int], work.FinishedSample]:
        return {(sample.group_index, sample.sample_index): sample for batch in self.batches for sample in batch}

    def value(self, name: str, cls: type) -> Any:
        """The result as a core dataclass; raises the command's failure."""
        if self.error is not None:
            raise self.error
        return from_proto(cls, getattr(self.result, name))


class EngineClient:
    """The coordinator's side of one engine."""

    _epochs = itertools.count(1)
    watch_s = 120.0
    """How long a command may take; a GPU's first one compiles."""

    def __init__(self, address: str) -> None:
        self.channel = sync_channel(address)
        self.phase = phase_grpc.PhaseServiceStub(self.channel)
        self.joined = self.phase.Join(phase_pb.JoinRequest(epoch=next(self._epochs)), timeout=90, wait_for_ready=True)
        self.join(self.new_epoch())

    @classmethod
    def new_epoch(cls) -> int:
        return next(cls._epochs)

    def join(self, epoch: int) -> None:
        """Ranks of one group join the same epoch."""
        self._epoch, self._sequence = epoch, 0
        self.joined = self.phase.Join(phase_pb.JoinRequest(epoch=epoch), timeout=10, wait_for_ready=True)

    def start(self, method: Callable, message: type, *, snapshot: int = 0, iteration: int = 0, timeout_s: float = 60,
              **fields: Any) -> str:
        self._sequence += 1
        header = types_pb2.CommandHeader(command_id=ids.new_id("command"), epoch=self._epoch, sequence=self._sequence,
                                         run=RUN, iteration=iteration, snapshot=snapshot)
        header.timeout.FromMilliseconds(int(timeout_s * 1000))
        try:
            return method(message(header=header, **fields), timeout=10).command_id
        except grpc.RpcError as error:
            self._sequence -= 1
            raise error_from_rpc(error) from error

    def watch(self, command_id: str, on_samples: Callable[[], None] = lambda: None) -> Outcome:
        outcome = Outcome()
        for event in self.phase.WatchCommand(phase_pb.WatchCommandRequest(command_id=command_id), timeout=self.watch_s):
            kind = event.WhichOneof("event")
            outcome.kinds.append(kind)
            if kind == "samples":
                outcome.batches.append([from_proto(work.FinishedSample, item) for item in event.samples.samples])
                on_samples()
            elif kind == "result":
                outcome.result = event.result
            elif kind == "failure":
                outcome.error = from_detail(event.failure)
        return outcome

    def open_run(self, run_config_json: str = "") -> work.OpenRunResult:
        command = self.start(self.phase.StartOpenRun, phase_pb.StartOpenRunRequest, run_config_json=run_config_json)
        return self.watch(command).value("open_run", work.OpenRunResult)

    def bind(self, snapshot: int) -> work.BindResult:
        command = self.start(self.phase.StartBindSnapshot, phase_pb.StartBindSnapshotRequest, snapshot=snapshot)
        return self.watch(command).value("bind", work.BindResult)

    def quiesce(self, *, leave: bool = True) -> work.QuiesceResult:
        command = self.start(self.phase.StartQuiesce, phase_pb.StartQuiesceRequest, leave_snapshot=leave)
        return self.watch(command).value("quiesce", work.QuiesceResult)

    def abort(self, command_id: str) -> bool:
        return self.phase.AbortCommand(phase_pb.AbortCommandRequest(command_id=command_id), timeout=10).aborting


class Actor:
    """The trainers' part: it fills every device's slab from a checkpoint and publishes snapshots.

    `views` are the whole parameters by training name, in memory of their own; each device gets its rollout shard of them.
    """

    def __init__(self, session: BrokerSession, checkpoint: Path, dtype: str = "float32", topology: Topology | None = None,
                 replica: int = 0) -> None:
        """`replica`: whose leader's device `slab` and `inode` are of."""
        config, self.topology = read_model_config(checkpoint), topology or Topology()
        self.session, self.snapshot = session, 0
        self.layout = ActorLayout.build(config, self.topology.rollout_tp, dtype, self.topology.train_tp)
        whole = ActorLayout.build(config, 1, dtype)
        self.views = whole.training_views(whole.views(torch.zeros(whole.size_bytes, dtype=torch.uint8)))
        load_into(checkpoint, config, self.views)
        self.slabs = [ids.actor_slab(RUN, self.topology.device_name(index)) for index in range(self.topology.device_count)]
        self.mappings = []
        for index, slab in enumerate(self.slabs):
            session.create(slab, object_class="actor_snapshot", device=self.topology.device_name(index),
                           size_bytes=self.layout.size_bytes,
                           run=RUN)
            self.mappings.append(ActorMapping(session, self.layout, self.topology.device_name(index)))
            self.mappings[-1].open(slab)
        self.inodes = [mapping.bind_for_update(None) for mapping in self.mappings]
        self._write()
        devices = self.topology.replica_devices(replica)
        self.slab, self.inode = self.slabs[devices[0]], self.inodes[devices[0]]
        self.inodes_of_replica = {self.topology.device_name(device): self.inodes[device] for device in devices}
        session.register_snapshot(RUN, self.slabs, 0)

    def publish(self, change: Callable[[dict[str, torch.Tensor]], None]) -> int:
        """Applies `change` to the whole parameters and writes them under an update epoch; the new snapshot's number."""
        epoch = self.session.begin_update(RUN, self.snapshot, [self.session.process])
        for mapping in self.mappings:
            mapping.bind_for_update(epoch)
        change(self.views)
        self._write()
        self.snapshot += 1
        self.session.publish_snapshot(RUN, epoch, self.snapshot)
        return self.snapshot

    def close(self) -> None:
        for mapping in self.mappings:
            mapping.close()

    def _write(self) -> None:
        for device, mapping in enumerate(self.mappings):
            for name, view in self.layout.segment_views(mapping.views()).items():
                shard = self.layout.rollout_shards[name]
                view.copy_(shard.take(self.views[name], self.topology.rollout_shard(device)))
            mapping.unbind()

    def depositor(self) -> Callable[[str, int, int], object]:
        return lambda name, fd, size: self.session.deposit(name, fd, object_class="media", run=RUN)


@contextmanager
def served(loop: Loop, mesh: MeshSection, name: str, engine: Any, add_role: Any) -> Iterator[EngineClient]:
    running = loop.run(start_engine(name, mesh.address(name), engine, add_role))
    client = EngineClient(mesh.address(name))
    try:
        yield client
    finally:
        client.channel.close()
        loop.run(running.drain(2))
        engine.close()


@contextmanager
def engine_process(mesh: MeshSection, module: str, name: str, *options: str, ready_s: float = 90
                   ) -> Iterator[tuple[EngineClient, subprocess.Popen]]:
    """`python -m module` over the mesh's own config file, until the end of the context."""
    command = [sys.executable, "-W", "ignore", "-m", module, "--set", f"mesh.runtime_dir={mesh.runtime_dir}", *options]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        with sync_channel(mesh.address(name)) as channel:
            grpc.channel_ready_future(channel).result(ready_s)
        client = EngineClient(mesh.address(name))
        yield client, process
        client.channel.close()
        process.terminate()
        process.wait(20)
    finally:
        process.kill()
        process.wait()


def ledger_bytes(session: BrokerSession, object_class: str) -> int:
    """Bytes of a class in the ledger, all roles together."""
    return sum(row.size_bytes for row in session.ledger().rows if row.object_class == object_class)
