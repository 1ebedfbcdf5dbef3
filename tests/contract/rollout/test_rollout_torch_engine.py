"""What only the `torch` engine shows: it decodes in this process, so its tensors can be looked at."""

from __future__ import annotations

import pytest
from replica_rig import mapped_ranges

pytestmark = pytest.mark.parametrize("engine_name", ["torch"], indirect=True, scope="module")


@pytest.fixture
def decoder(bound):
    return bound.engine._tokens._replica.decoder


def test_every_parameter_lies_in_the_read_only_mapping_of_the_slab(mesh, bound, decoder):
    ((start, end, permissions),) = mapped_ranges(mesh.actor.inode)
    assert permissions == "r--s"
    parameters = decoder.prefill.parameters_by_name()
    assert len(parameters) == len(mesh.actor.layout.shards)
    for tensor in [*decoder.weights.values(), *parameters.values()]:
        assert start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= end


def test_addresses_survive_and_nothing_is_mapped_after_quiesce(mesh, bound, decoder):
    before = {name: tensor.data_ptr() for name, tensor in decoder.weights.items()}
    bound.quiesce()
    assert mapped_ranges(mesh.actor.inode) == []
    bound.bind(mesh.actor.publish(lambda views: None))
    assert {name: tensor.data_ptr() for name, tensor in decoder.weights.items()} == before
    assert len(mapped_ranges(mesh.actor.inode)) == 1
