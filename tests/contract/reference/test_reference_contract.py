"""The reference over its socket: scores, boundaries, and weights that outlive the process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engine_rig import ledger_bytes
from reference_rig import expected, materialize, respond, score

from rollplex.core import work
from rollplex.core.errors import BadInput, DataLoss, WrongState

SLAB = "reference/weights/host"


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


def test_groups_scored_together_have_their_own_scores(mesh, reference, groups):
    """Where they fit `suffix_tokens`; one after the other where they do not."""
    lengths = [(3, 1, 2, 1), (2, 2, 2, 1), (9, 4, 5, 3), (3, 17, 1, 9)]
    responses = [respond(group, lengths[group.group_index]) for group in groups]
    reference.open_run(json.dumps({"suffix_micro_batch_samples": 8, "sampling": {"samples_per_group": 4}}))
    materialize(reference, groups)
    scored = score(reference, responses)
    reference.open_run()
    assert [(sample.group_index, sample.sample_index) for sample in scored.samples] == [
        (response.group_index, index) for response in responses for index in range(4)]
    found = iter(scored.samples)
    for group, response in zip(groups, responses):
        for values in expected(mesh, group, response):
            np.testing.assert_allclose(np.array(next(found).logprobs), values, atol=1e-4)


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
