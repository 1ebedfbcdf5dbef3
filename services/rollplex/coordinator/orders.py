"""Commands to engines as requests: the one place where the coordinator's work becomes protos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.core import work
from rollplex.rpc.channel import MAX_MESSAGE_BYTES
from rollplex.rpc.convert import to_proto
from rollplex.v1 import (
    phase_service_pb2,
    reference_service_pb2,
    rollout_service_pb2,
    trainer_service_pb2,
    types_pb2,
)

TOKEN_BYTES = 8 + 3 * 4
"""Of a response token: its id and up to three log-probabilities."""


@dataclass(frozen=True, slots=True)
class Order:
    """A Start* method and its request, which lacks only the header."""

    method: str
    request: Any


def open_run(config_json: str, *, attach: bool) -> Order:
    return Order("StartOpenRun", phase_service_pb2.StartOpenRunRequest(run_config_json=config_json, attach=attach))


def bind_snapshot() -> Order:
    return Order("StartBindSnapshot", phase_service_pb2.StartBindSnapshotRequest())


def quiesce(*, leave_snapshot: bool) -> Order:
    return Order("StartQuiesce", phase_service_pb2.StartQuiesceRequest(leave_snapshot=leave_snapshot))


def generate(groups: Sequence[work.PreparedGroup], sampling: work.Sampling) -> Order:
    return Order("StartGenerate", rollout_service_pb2.StartGenerateRequest(
        groups=_prepared(groups), sampling=to_proto(sampling, rollout_service_pb2.Sampling)))


def reference_prefix(groups: Sequence[work.PreparedGroup]) -> Order:
    return Order("StartMaterializePrefix", reference_service_pb2.StartReferencePrefixRequest(groups=_prepared(groups)))


def trainer_prefix(groups: Sequence[work.PreparedGroup]) -> Order:
    return Order("StartMaterializePrefix", trainer_service_pb2.StartTrainerPrefixRequest(groups=_prepared(groups)))


def score_suffix(groups: Sequence[work.ResponseGroup], temperature: float, *, keep_boundaries: bool) -> Order:
    return Order("StartScoreSuffix", reference_service_pb2.StartScoreSuffixRequest(
        groups=_responses(groups), temperature=temperature, keep_boundaries=keep_boundaries))


def train_suffix(groups: Sequence[work.ResponseGroup], scale: work.LossScale) -> Order:
    return Order("StartTrainSuffix", trainer_service_pb2.StartTrainSuffixRequest(
        groups=_responses(groups), scale=to_proto(scale, trainer_service_pb2.LossScale)))


def measure_gradient() -> Order:
    return Order("StartMeasureGradient", trainer_service_pb2.StartMeasureGradientRequest())


def apply_update(order: work.UpdateOrder) -> Order:
    return Order("StartApplyUpdate", to_proto(order, trainer_service_pb2.StartApplyUpdateRequest))


def export_checkpoint(path: str) -> Order:
    return Order("StartExportCheckpoint", trainer_service_pb2.StartExportCheckpointRequest(path=path))


def write_checkpoint(path: str) -> Order:
    return Order("StartWriteCheckpoint", trainer_service_pb2.StartWriteCheckpointRequest(path=path))


def restore_checkpoint(path: str, optimizer_step: int, layout_digest: str) -> Order:
    return Order("StartRestoreCheckpoint", trainer_service_pb2.StartRestoreCheckpointRequest(
        path=path, optimizer_step=optimizer_step, layout_digest=layout_digest))


def wait_checkpoint(path: str) -> trainer_service_pb2.WaitCheckpointRequest:
    """Out of band: no order."""
    return trainer_service_pb2.WaitCheckpointRequest(path=path)


def in_messages(packs: Iterable[Sequence[work.ResponseGroup]]) -> list[list[work.ResponseGroup]]:
    """Whole packs (core.packs: an engine makes the same again), in order, in parts that stay well below gRPC's message limit."""
    parts: list[list[work.ResponseGroup]] = []
    room_bytes = 0
    for pack in packs:
        size_bytes = sum(TOKEN_BYTES * len(sample.token_ids) + 64 for group in pack for sample in group.samples)
        if not parts or size_bytes > room_bytes:
            parts.append([])
            room_bytes = MAX_MESSAGE_BYTES // 4
        parts[-1] += pack
        room_bytes -= size_bytes
    return parts


def _prepared(groups: Sequence[work.PreparedGroup]) -> list[types_pb2.PreparedGroup]:
    return [to_proto(group, types_pb2.PreparedGroup) for group in groups]


def _responses(groups: Sequence[work.ResponseGroup]) -> list[reference_service_pb2.ResponseGroup]:
    return [to_proto(group, reference_service_pb2.ResponseGroup) for group in groups]
