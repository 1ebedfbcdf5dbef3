"""Commands to engines as requests: the one place where the coordinator's work becomes protos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.core import work
from rollplex.rpc.convert import to_proto
from rollplex.v1 import (
    phase_service_pb2,
    reference_service_pb2,
    rollout_service_pb2,
    trainer_service_pb2,
    types_pb2,
)


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


def _prepared(groups: Sequence[work.PreparedGroup]) -> list[types_pb2.PreparedGroup]:
    return [to_proto(group, types_pb2.PreparedGroup) for group in groups]


def _responses(groups: Sequence[work.ResponseGroup]) -> list[reference_service_pb2.ResponseGroup]:
    return [to_proto(group, reference_service_pb2.ResponseGroup) for group in groups]
