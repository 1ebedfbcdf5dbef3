"""A role's ranks: where each sits, and which groups it computes."""

from __future__ import annotations

import threading
from array import array

import pytest

from rollplex.core.errors import BadInput
from rollplex.core.topology import Topology
from rollplex.core.work import PreparedGroup
from rollplex.model import Ranks

GROUPS = [PreparedGroup(index, array("q", [5])) for index in (7, 0, 3, 4, 5)]


@pytest.mark.parametrize(("size", "tensor_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (8, 1)])
def test_a_replicas_ranks_hold_a_replica_of_rollout(size, tensor_size):
    """By devices: what they compute with is on their own."""
    topology, everybody = Topology(size, tensor_size), [Ranks(rank, size, tensor_size) for rank in range(size)]
    for ranks in everybody:
        assert ranks.tensor_rank == topology.rollout_shard(ranks.rank)
        assert ranks.rank in topology.replica_devices(ranks.replica)
        assert (ranks.tensor.rank(), ranks.tensor.size()) == (ranks.tensor_rank, tensor_size)
        assert (ranks.data.rank(), ranks.data.size()) == (topology.part(ranks.rank), topology.q)


@pytest.mark.parametrize(("size", "tensor_size"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_every_group_is_one_replicas(size, tensor_size):
    everybody = [Ranks(rank, size, tensor_size) for rank in range(size)]
    for group in GROUPS:
        owners = {ranks.replica for ranks in everybody if group in ranks.own(GROUPS)}
        assert owners == {group.group_index % (size // tensor_size)}
    for ranks in everybody:
        own = ranks.own(GROUPS)
        assert own == [group for group in GROUPS if group in own], "in the order given"
        assert [group for group in GROUPS[2:] if group in own] == ranks.own(GROUPS[2:]), "whatever it comes with"


@pytest.mark.parametrize(("size", "tensor_size"), [(4, 3), (2, 4), (2, 0)])
def test_what_does_not_divide_is_refused(size, tensor_size):
    with pytest.raises(BadInput, match="tensor-parallel groups"):
        Ranks(0, size, tensor_size)


def test_groups_are_aborted_at_once(monkeypatch):
    """An abort waits for the GPU, so also for a kernel that spins in a group whose abort has not begun. One that fails stops
    none."""
    together = threading.Barrier(3, timeout=20)

    class Waiting:
        def __init__(self, fails: bool = False) -> None:
            self.fails, self.aborted = fails, False

        def abort(self) -> None:
            together.wait()
            if self.fails:
                raise RuntimeError("a kernel still runs")
            self.aborted = True

    ranks = Ranks(0, 4, 2)
    ranks.tensor, ranks.data, whole = Waiting(), Waiting(fails=True), Waiting()
    monkeypatch.setattr(Ranks, "world", whole)
    monkeypatch.setattr("rollplex.model.ranks.dist.is_initialized", lambda: True)
    ranks.abort()
    assert (ranks.tensor.aborted, ranks.data.aborted, whole.aborted) == (True, False, True)
