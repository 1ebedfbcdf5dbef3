"""Every core dataclass that crosses the wire has a message with the same fields, and survives the round trip."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from rollplex.core import work
from rollplex.core.placement import Placement
from rollplex.rpc.convert import array_from_proto, array_to_proto, from_proto, to_proto
from rollplex.v1 import (
    phase_service_pb2,
    reference_service_pb2,
    rollout_service_pb2,
    trainer_service_pb2,
    types_pb2,
)

FRAMES = Placement.contiguous("runs/a/media/iteration-0/3", 64, (2, 28, 28, 3), "uint8")
IDS, LOGPROBS = array("q", [1, 2**40, -3]), array("f", [-0.5, -1.5, 0.0])

PAIRS = [
    (work.MediaItem("video", FRAMES, 4.0, "ab"), types_pb2.MediaItem),
    (work.PreparedGroup(3, IDS, (work.MediaItem("image", FRAMES),), "hash", 8, 12), types_pb2.PreparedGroup),
    (work.Sampling(0.7, 12, True, -5, True), rollout_service_pb2.Sampling),
    (work.FinishedSample(1, 2, IDS, LOGPROBS, "stop"), phase_service_pb2.FinishedSample),
    (work.ResponseGroup(1, (work.ResponseSample(0, IDS), work.ResponseSample(1, IDS, LOGPROBS, LOGPROBS, LOGPROBS, 0.5, False))),
     reference_service_pb2.ResponseGroup),
    (work.SampleLogprobs(1, 2, LOGPROBS), phase_service_pb2.SampleLogprobs),
    (work.WrittenPart(5, "digest", "bfloat16", "float32"), trainer_service_pb2.WaitCheckpointResponse),
    (work.LossScale(8, 100, 12), trainer_service_pb2.LossScale),
    (work.ResidencyEntry("media", "coordinator", "host", "pinned", 5, 6), types_pb2.ResidencyEntry),
    (work.OpenRunResult("slab", 10, 3, 99), phase_service_pb2.OpenRunResult),
    (work.BindResult(3, 40, {"host:0": 7}), phase_service_pb2.BindResult),
    (work.QuiesceResult(5), phase_service_pb2.QuiesceResult),
    (work.GenerateResult(1, 2, 0.5, 1.5, ("a", "b")), phase_service_pb2.GenerateResult),
    (work.PrefixResult(("a",), 5, 6), phase_service_pb2.PrefixResult),
    (work.ScoreResult((work.SampleLogprobs(0, 0, LOGPROBS),)), phase_service_pb2.ScoreResult),
    (work.SuffixResult({"actor/pg_loss": 0.5}), phase_service_pb2.SuffixResult),
    (work.GradientResult(1.5, True), phase_service_pb2.GradientResult),
    (work.UpdateResult(3, 4, 5), phase_service_pb2.UpdateResult),
    (work.CheckpointResult("/out", 5), phase_service_pb2.CheckpointResult),
]


@pytest.mark.parametrize(("value", "message"), PAIRS, ids=lambda item: getattr(type(item), "__name__", ""))
def test_round_trip(value, message):
    sent = message.FromString(to_proto(value, message).SerializeToString())
    assert from_proto(type(value), sent) == value


def test_the_update_order_has_its_fields_in_the_request():
    fields = set(trainer_service_pb2.StartApplyUpdateRequest.DESCRIPTOR.fields_by_name)
    assert {item.name for item in dataclasses.fields(work.UpdateOrder)} == fields - {"header"}


def test_arrays_are_checked():
    assert array_from_proto(array_to_proto(IDS)) == IDS
    with pytest.raises(ValueError, match="12 bytes"):
        array_from_proto(types_pb2.NumericArray(dtype="int64", shape=[2], data=b"x" * 12))
    with pytest.raises(ValueError, match="dtype"):
        array_from_proto(types_pb2.NumericArray(dtype="object", shape=[1], data=b"x"))


def test_a_field_that_must_be_there_is_missed():
    with pytest.raises(ValueError, match="PreparedGroup.token_ids is not set"):
        from_proto(work.PreparedGroup, types_pb2.PreparedGroup())
