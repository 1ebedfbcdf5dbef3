"""The coordinator's side of a trainer: commands over its socket, snapshots at the broker."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from engine_rig import EngineClient

from rollplex.core import ids, work
from rollplex.core.config import LossConfig, OptimizerConfig, RunConfig, SamplingConfig
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.core.strict import to_plain
from rollplex.core.topology import is_host
from rollplex.memory.client import BrokerSession
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.rpc.convert import from_proto, to_proto
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import phase_service_pb2, reference_service_pb2, trainer_service_pb2, trainer_service_pb2_grpc, types_pb2

MAX_TOKENS = 16


def config(**fields) -> RunConfig:
    return RunConfig(
        sampling=SamplingConfig(samples_per_group=4, max_response_tokens=MAX_TOKENS, temperature=0.9),
        loss=LossConfig(aggregation="token-mean"),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, chunk_elements=60_000),
        **fields)  # fmt: skip


def respond(groups, *, seed: int = 0) -> list[work.ResponseGroup]:
    """Four responses of unequal lengths a group; the last sample of the first group is unscored."""
    responses = []
    for group in groups:
        rng = np.random.default_rng([seed, group.group_index])
        samples = []
        for index, length in enumerate((3, 11, 1, 7)):
            samples.append(work.ResponseSample(
                index, array("q", rng.integers(0, 300, length).tolist()), advantage=float(rng.normal()),
                rollout_logprobs=array("f", (-6 + rng.random(length)).tolist()),
                scored=(group.group_index, index) != (0, 3)))
        responses.append(work.ResponseGroup(group.group_index, tuple(samples)))
    return responses


def scale_of(responses) -> work.LossScale:
    samples = [sample for group in responses for sample in group.samples]
    return work.LossScale(len(samples), sum(len(sample.token_ids) for sample in samples), MAX_TOKENS)


@dataclass
class Iterated:
    prefix: work.PrefixResult
    suffix: work.SuffixResult
    gradient: work.GradientResult
    update: work.UpdateResult


class TrainerClient(EngineClient):
    """One trainer rank, and its run's snapshot."""

    command_s = 60.0

    def __init__(self, address: str, session: BrokerSession, run: str, rank: int = 0, *, devices: str = "host") -> None:
        """`devices`: MeshSection.devices."""
        super().__init__(address)
        self.trainer = trainer_service_pb2_grpc.TrainerServiceStub(self.channel)
        self.session, self.run, self.slab = session, run, ids.actor_slab(run, f"{devices}:{rank}")

    def start(self, method, message, *, snapshot=0, iteration=0, timeout_s=None, **fields) -> str:
        timeout_s = timeout_s or self.command_s
        self._sequence += 1
        header = types_pb2.CommandHeader(command_id=ids.new_id("command"), epoch=self._epoch, sequence=self._sequence,
                                         run=self.run, iteration=iteration, snapshot=snapshot)
        header.timeout.FromMilliseconds(int(timeout_s * 1000))
        try:
            return method(message(header=header, **fields), timeout=10).command_id
        except grpc.RpcError as error:
            self._sequence -= 1
            raise error_from_rpc(error) from error

    def open(self, run_config: RunConfig, *, attach: bool = False, snapshot: int = -1, register: bool = True
             ) -> work.OpenRunResult:
        """A new run is registered as snapshot 0, as the coordinator does."""
        command = self.start(self.phase.StartOpenRun, phase_service_pb2.StartOpenRunRequest, snapshot=snapshot,
                             run_config_json=json.dumps(to_plain(run_config)), attach=attach)
        result = self.watch(command).value("open_run", work.OpenRunResult)
        if register and not attach:
            self.session.register_snapshot(self.run, [result.actor_slab], 0)
        return result

    def materialize(self, groups, snapshot: int) -> work.PrefixResult:
        command = self.start(self.trainer.StartMaterializePrefix, trainer_service_pb2.StartTrainerPrefixRequest,
                             snapshot=snapshot, groups=[to_proto(group, types_pb2.PreparedGroup) for group in groups])
        return self.watch(command).value("prefix", work.PrefixResult)

    def score(self, responses, snapshot: int, *, temperature: float, keep: bool) -> work.ScoreResult:
        groups = [to_proto(group, reference_service_pb2.ResponseGroup) for group in responses]
        command = self.start(self.trainer.StartScoreSuffix, reference_service_pb2.StartScoreSuffixRequest,
                             snapshot=snapshot, groups=groups, temperature=temperature, keep_boundaries=keep)
        return self.watch(command).value("score", work.ScoreResult)

    def train(self, responses, snapshot: int) -> work.SuffixResult:
        return self.watch(self.start_train(responses, snapshot)).value("suffix", work.SuffixResult)

    def start_train(self, responses, snapshot: int) -> str:
        groups = [to_proto(group, reference_service_pb2.ResponseGroup) for group in responses]
        scale = to_proto(scale_of(responses), trainer_service_pb2.LossScale)
        return self.start(self.trainer.StartTrainSuffix, trainer_service_pb2.StartTrainSuffixRequest,
                          snapshot=snapshot, groups=groups, scale=scale)

    def measure(self) -> work.GradientResult:
        command = self.start(self.trainer.StartMeasureGradient, trainer_service_pb2.StartMeasureGradientRequest)
        return self.watch(command).value("gradient", work.GradientResult)

    def apply(self, order: work.UpdateOrder, snapshot: int) -> work.UpdateResult:
        fields = {name: getattr(order, name) for name in work.UpdateOrder.__slots__}
        command = self.start(self.trainer.StartApplyUpdate, trainer_service_pb2.StartApplyUpdateRequest,
                             snapshot=snapshot, **fields)
        return self.watch(command).value("update", work.UpdateResult)

    def export(self, path: Path, snapshot: int) -> work.CheckpointResult:
        command = self.start(self.trainer.StartExportCheckpoint, trainer_service_pb2.StartExportCheckpointRequest,
                             snapshot=snapshot, path=str(path))
        return self.watch(command).value("checkpoint", work.CheckpointResult)

    def start_checkpoint(self, path: Path, snapshot: int) -> work.CheckpointResult:
        command = self.start(self.trainer.StartWriteCheckpoint, trainer_service_pb2.StartWriteCheckpointRequest,
                             snapshot=snapshot, path=str(path))
        return self.watch(command).value("checkpoint", work.CheckpointResult)

    def wait_checkpoint(self, path: Path) -> work.WrittenPart:
        try:
            answer = self.trainer.WaitCheckpoint(trainer_service_pb2.WaitCheckpointRequest(path=str(path)), timeout=30)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return from_proto(work.WrittenPart, answer)

    def restore(self, path: Path, optimizer_step: int, digest: str) -> work.CheckpointResult:
        command = self.start(self.trainer.StartRestoreCheckpoint, trainer_service_pb2.StartRestoreCheckpointRequest,
                             path=str(path), optimizer_step=optimizer_step, layout_digest=digest)
        return self.watch(command).value("checkpoint", work.CheckpointResult)

    def begin(self, snapshot: int) -> int:
        return self.session.begin_update(self.run, snapshot, ["trainer-0"])

    def iterate(self, groups, snapshot: int) -> Iterated:
        """k -> k + 1, and binds it."""
        responses = respond(groups, seed=snapshot)
        prefix, suffix = self.materialize(groups, snapshot), self.train(responses, snapshot)
        gradient = self.measure()
        self.quiesce()
        epoch = self.begin(snapshot)
        clip = min(1.0, 0.5 / gradient.grad_norm)
        update = self.apply(work.UpdateOrder(epoch, clip, 1.0, snapshot + 1), snapshot)
        self.session.publish_snapshot(self.run, epoch, snapshot + 1)
        self.bind(snapshot + 1)
        return Iterated(prefix, suffix, gradient, update)

    def actor_bytes(self, snapshot: int) -> bytes:
        """As a reader of the snapshot sees them."""
        with self.session.lease(self.slab, LeaseMode.READ, snapshot=snapshot) as lease:
            if is_host(lease.slab.device):
                return Path(f"/proc/self/fd/{lease.fd}").read_bytes()
            mapped = MappedSlab(driver_of(lease.slab.device), lease.slab.size_bytes)
            try:
                mapped.bind(lease)
                whole = mapped.tensor(Placement.contiguous("", 0, (lease.slab.size_bytes,), "uint8"))
                return whole.cpu().numpy().tobytes()
            finally:
                mapped.close()
