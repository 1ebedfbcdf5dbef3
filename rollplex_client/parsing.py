"""CoordinatorService messages -> dataclasses of `results`."""

from __future__ import annotations

import json
from array import array
from datetime import UTC, datetime
from typing import Any

from google.protobuf import timestamp_pb2

from rollplex.core.errors import InternalError
from rollplex.rpc.status import from_detail
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1 import memory_broker_service_pb2, types_pb2
from rollplex_client import results


def _enum(enum: Any, prefix: str, number: int) -> str:
    return enum.Name(number).removeprefix(prefix).lower()


def _phase(number: int) -> Any:
    return "" if number == types_pb2.PHASE_UNSPECIFIED else _enum(types_pb2.Phase, "PHASE_", number)


def _time(message: Any, field: str) -> datetime | None:
    stamp: timestamp_pb2.Timestamp = getattr(message, field)
    return stamp.ToDatetime(tzinfo=UTC) if message.HasField(field) else None


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def run(message: pb.Run) -> results.Run:
    return results.Run(name=message.name, state=_enum(pb.RunState, "RUN_STATE_", message.state),
                       config=json.loads(message.config_json or "{}"), snapshot=message.snapshot,
                       next_iteration=message.next_iteration, create_time=_time(message, "create_time"),
                       last_sequence=message.last_sequence,
                       replay_iterations=message.replay_iterations)


def iteration(message: pb.Iteration) -> results.Iteration:
    return results.Iteration(
        run=message.run, iteration=message.iteration, validation=message.validation,
        state=_enum(pb.IterationState, "ITERATION_STATE_", message.state), snapshot=message.snapshot,
        metrics=dict(message.metrics), error=from_detail(message.error) if message.HasField("error") else None,
        create_time=_time(message, "create_time"), end_time=_time(message, "end_time"))


def handle(message: pb.SubmitIterationResponse) -> results.IterationHandle:
    submitted = message.iteration
    return results.IterationHandle(submitted.run, submitted.iteration, submitted.validation, message.after_sequence)


def event(message: pb.WatchRunResponse) -> results.Event:
    """Raises InternalError for an event of a kind that this client does not know."""
    kind = message.WhichOneof("event")
    body: results.PhaseSpan | results.Progress | results.Iteration | results.Note
    if kind == "phase":
        phase = message.phase
        body = results.PhaseSpan(_phase(phase.phase), phase.span, phase.ended, phase.start_s, phase.duration_s)
    elif kind == "progress":
        done = message.progress
        body = results.Progress(done.samples_done, done.samples_total, done.samples_scored, done.response_tokens,
                                _optional(done, "reward_mean"))
    elif kind == "iteration_state":
        body = iteration(message.iteration_state)
    elif kind == "note":
        body = results.Note(message.note.level, message.note.reason, message.note.message)
    else:
        raise InternalError(f"event {message.sequence} is of no kind that this client knows; update rollplex",
                            reason="UNKNOWN_EVENT", sequence=message.sequence)
    return results.Event(message.sequence, _time(message, "time"), message.iteration, message.validation, body)


_ITEM_CODES = {"int64": "q", "int32": "i", "float64": "d", "float32": "f"}


def _numbers(message: types_pb2.NumericArray) -> tuple[Any, ...]:
    if not message.dtype:
        return ()
    values = array(_ITEM_CODES[message.dtype])
    values.frombytes(message.data)
    return tuple(values)


def sample(message: pb.SampleRecord) -> results.Sample:
    return results.Sample(
        group_index=message.group_index, sample_index=message.sample_index, response_text=message.response_text,
        token_ids=_numbers(message.token_ids), reward=_optional(message, "reward"),
        advantage=_optional(message, "advantage"), finish_reason=message.finish_reason, parts=dict(message.parts))


def reward(message: pb.RewardRegistration) -> results.Reward:
    return results.Reward(message.name, message.address, message.weight, message.timeout_s, message.retries)


def reward_health(message: pb.RewardHealth) -> results.Reward:
    given = message.reward
    return results.Reward(given.name, given.address, given.weight, given.timeout_s, given.retries,
                          reachable=message.reachable, error=message.error)


def _ledger_entry(row: memory_broker_service_pb2.LedgerRow) -> results.LedgerEntry:
    return results.LedgerEntry(row.object_class, row.role, row.device, _phase(row.phase), row.size_bytes,
                               row.slab_count, _residency(row.residency))


def _residency(number: int) -> Any:
    return "" if number == types_pb2.RESIDENCY_UNSPECIFIED else _enum(types_pb2.Residency, "RESIDENCY_", number)


def mesh(message: pb.GetMeshResponse) -> results.Mesh:
    services = tuple(results.Service(item.name, item.address, item.health, item.pid, item.bound_snapshot)
                     for item in message.services)
    ledger = message.ledger
    return results.Mesh(services, message.open_run, _phase(message.phase) or "idle",
                        tuple(_ledger_entry(row) for row in ledger.rows),
                        tuple(_ledger_entry(row) for row in ledger.peaks),
                        ledger.host_slab_bytes, ledger.host_limit_bytes, dict(ledger.counts))
