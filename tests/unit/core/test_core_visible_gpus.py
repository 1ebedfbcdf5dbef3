"""The mesh's GPU numbers against the process's own."""

from __future__ import annotations

import os

import pytest

from rollplex.core.errors import BadInput
from rollplex.core.topology import Topology, torch_device
from rollplex.core.visible_gpus import CHOSEN, CUDA, see_only, visible_ordinal


@pytest.fixture
def environment(monkeypatch):
    """What torch_device reads, too; as it was after the test."""
    for name in (CUDA, CHOSEN):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return os.environ


def test_a_process_that_has_chosen_nothing_sees_all():
    assert [visible_ordinal(gpu, {}) for gpu in range(3)] == [0, 1, 2]


def test_the_only_gpu_that_is_seen_is_the_first(environment):
    see_only([2])
    assert (environment[CUDA], environment[CHOSEN]) == ("2", "2")
    assert torch_device("cuda:2") == "cuda:0"
    for other in ("cuda:0", "cuda:1", "cuda:3"):
        with pytest.raises(BadInput, match=other.removeprefix("cuda:")) as caught:
            torch_device(other)
        assert caught.value.reason == "GPU_NOT_VISIBLE"
    assert torch_device("host:7") == "cpu"


def test_ranks_of_a_replica_come_in_their_order(environment):
    topology = Topology(8, 4, device_kind="cuda")
    see_only(topology.replica_devices(1))
    assert environment[CUDA] == "1,3,5,7"
    assert [torch_device(topology.device_name(device)) for device in topology.replica_devices(1)] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_replica_on_devices_of_its_own_sees_what_it_copies_from_after_them(environment):
    topology = Topology(2, 2, own_replicas=1, device_kind="cuda")
    see_only((*topology.replica_devices(0), *topology.source(0)))
    assert environment[CUDA] == "2,3,0,1"
    assert (torch_device("cuda:3"), torch_device("cuda:0")) == ("cuda:1", "cuda:2")


@pytest.mark.parametrize("shown", ["4,6,7", "GPU-aa,GPU-bb,GPU-cc"])
def test_what_the_process_was_given_is_kept(shown):
    names = shown.split(",")
    environment = {CUDA: shown}
    see_only([2, 0], environment)
    assert environment[CUDA] == f"{names[2]},{names[0]}"
    assert visible_ordinal(0, environment) == 1


def test_choosing_again_chooses_among_the_chosen():
    environment = {CUDA: "4,6,7"}
    see_only([2, 1], environment)
    see_only([2, 1], environment)
    assert environment == {CUDA: "7,6", CHOSEN: "2,1"}
    see_only([1], environment)
    assert environment == {CUDA: "6", CHOSEN: "1"}
    with pytest.raises(BadInput):
        see_only([2], environment)


def test_a_gpu_twice_is_one_gpu():
    environment = {}
    see_only([1, 1], environment)
    assert environment == {CUDA: "1", CHOSEN: "1"}


def test_more_gpus_than_are_shown_are_refused_and_nothing_changes():
    environment = {CUDA: "0,1"}
    with pytest.raises(BadInput, match="0,1"):
        see_only([2], environment)
    assert environment == {CUDA: "0,1"}
