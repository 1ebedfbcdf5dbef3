"""The reference over its socket: scores, boundaries, and weights that outlive the process."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import EngineClient, ledger_bytes

from rollplex.core import work
from rollplex.core.errors import BadInput, DataLoss, WrongState
from rollplex.model import pack_responses, prefix_forward, suffix_forward, token_logprobs
from rollplex.rpc.convert import to_proto
from rollplex.v1 import reference_service_pb2, reference_service_pb2_grpc, types_pb2

SLAB = "reference/weights/host"


def materialize(client: EngineClient, groups) -> work.PrefixResult:
    stub = reference_service_pb2_grpc.ReferenceServiceStub(client.channel)
    command = client.start(stub.StartMaterializePrefix, reference_service_pb2.StartReferencePrefixRequest,
                           groups=[to_proto(group, types_pb2.PreparedGroup) for group in groups])
    return client.watch(command).value("prefix", work.PrefixResult)


def score(client: EngineClient, responses, *, temperature=0.8, keep=False) -> work.ScoreResult:
    stub = reference_service_pb2_grpc.ReferenceServiceStub(client.channel)
    groups = [to_proto(group, reference_service_pb2.ResponseGroup) for group in responses]
    command = client.start(stub.StartScoreSuffix, reference_service_pb2.StartScoreSuffixRequest, groups=groups,
                           temperature=temperature, keep_boundaries=keep)
    return client.watch(command).value("score", work.ScoreResult)


def respond(group, lengths=(3, 17, 1, 9)) -> work.ResponseGroup:
    rng = np.random.default_rng(group.group_index)
    return work.ResponseGroup(group.group_index, tuple(
        work.ResponseSample(index, array("q", rng.integers(0, 300, length).tolist()))
        for index, length in enumerate(lengths)))


@torch.no_grad()
def expected(mesh, group, response, temperature=0.8):
    inputs = mesh.reader.read(group)
    tokens = [torch.tensor(sample.token_ids) for sample in response.samples]
    packed = pack_responses(inputs.last_token, tokens, inputs.suffix_position)
    hidden = suffix_forward(mesh.oracle, prefix_forward(mesh.oracle, inputs), packed)
    logp, _ = token_logprobs(mesh.oracle, hidden, packed.targets, temperature=temperature,
                             forbidden=mesh.oracle.config.forbidden_token_ids)
    return [part.numpy() for part in packed.split(logp)]


@pytest.fixture(scope="module")
def opened(serve_reference):
    with serve_reference() as client:
        client.open_run()
        yield client


@pytest.fixture
def reference(opened):
    yield opened
    opened.quiesce()


@pytest.fixture
def groups(mesh):
    return [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "image", "video", "mixed"])]


def test_scores_are_the_checkpoints_logprobs(mesh, reference, groups):
    result = materialize(reference, groups)
    assert result.prompt_hashes == tuple(group.prompt_hash for group in groups)
    assert result.boundary_bytes == ledger_bytes(mesh.session, "boundary_reference") > 0
    responses = [respond(group) for group in groups[::-1]]
    scored = score(reference, responses)
    assert [(sample.group_index, sample.sample_index) for sample in scored.samples] == [
        (response.group_index, index) for response in responses for index in range(4)]
    found = iter(scored.samples)
    for group, response in zip(groups[::-1], responses):
        for values in expected(mesh, group, response):
            np.testing.assert_allclose(np.array(next(found).logprobs), values, atol=1e-4)
    assert ledger_bytes(mesh.session, "boundary_reference") == 0


def test_boundaries_are_consumed_unless_kept(reference, groups):
    materialize(reference, groups[:2])
    kept = score(reference, [respond(groups[0])], keep=True)
    assert score(reference, [respond(groups[0])]) == kept
    with pytest.raises(WrongState) as caught:
        score(reference, [respond(groups[1]), respond(groups[0])])
    assert caught.value.reason == "BOUNDARY_MISSING"
    score(reference, [respond(groups[1])])  # the refusal above consumed nothing


def test_a_boundary_is_replaced_when_made_again(mesh, reference, groups):
    once = materialize(reference, groups[2:3]).boundary_bytes
    assert materialize(reference, groups[2:3]).boundary_bytes == once


def test_quiesce_drops_boundaries(mesh, reference, groups):
    held = materialize(reference, groups).boundary_bytes
    assert reference.quiesce().released_bytes == held
    assert ledger_bytes(mesh.session, "boundary_reference") == 0
    with pytest.raises(WrongState):
        score(reference, [respond(groups[0])])


def test_weights_are_mapped_only_around_compute(mesh, reference, groups):
    inode = reference.bind(0).inodes["host"]
    (slab,) = mesh.session.list_slabs(SLAB)
    assert (slab.inode, slab.object_class) == (inode, "reference_weights")
    materialize(reference, groups[:1])
    with Path("/proc/self/maps").open() as maps:
        assert not [line for line in maps if int(line.split()[4]) == inode]


def test_refusals(reference, groups):
    materialize(reference, groups[:1])
    with pytest.raises(BadInput):
        score(reference, [respond(groups[0])], temperature=0.0)
    with pytest.raises(BadInput):
        score(reference, [respond(groups[0], lengths=(2, 0))])
    with pytest.raises(DataLoss):
        materialize(reference, [work.PreparedGroup(9, groups[0].token_ids, (), "0" * 64)])
