"""Trainer ranks as processes over one broker: the same updates as one rank's, and what a dead or late rank does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_ranks import distance, three_updates, trainer_ranks
from trainer_rig import config, respond

from rollplex.core.errors import Aborted, DeadlineExceeded
from rollplex.model import load_into, read_model_config

pytestmark = pytest.mark.ranks


@pytest.fixture
def ranks(mesh, run, tmp_path):
    """ranks(train_tp, rollout_tp, dtype): a group of trainer processes until the end of the context."""
    def start(train_tp: int, rollout_tp: int, dtype: str = "float32", **fields):
        section = replace(mesh.section, train_tensor_parallel=train_tp, rollout_tensor_parallel=rollout_tp, **fields)
        whole = replace(mesh.config, mesh=section, model=replace(mesh.config.model, dtype=dtype),
                        trainer=replace(mesh.config.trainer, check_hashes=True))
        return trainer_ranks(whole, mesh.session, f"{run}-{train_tp}", tmp_path)

    return start


TOLERANCE = {"float32": 1e-3, "float64": 1e-10}
PAIRS = {"float32": [(2, 1), (2, 2), (4, 2)], "float64": [(2, 1), (2, 2), (4, 2), (4, 1), (4, 4)]}


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, tuple]:
    """dtype -> what `three_updates` gave at TP 1, once a module."""
    return {}


SHARED = {"float32": [(2, 1)], "float64": [(2, 1), (4, 2), (4, 1)]}
CASES = [(dtype, pair, shared, 0) for shared, cases in ((False, PAIRS), (True, SHARED)) for dtype, pairs in cases.items()
         for pair in pairs]
CASES += [("float64", (2, 1), False, 8), ("float64", (2, 1), True, 16)]


@pytest.mark.parametrize(("dtype", "pair", "shared", "micro_batch"), CASES, ids=str)
def test_updates_equal_one_ranks(ranks, groups, of_one_rank, dtype, pair, shared, micro_batch):
    """q = 1, 2 and 4. At TP 4 there are more ranks than kv heads, so that some hold the same head. `shared`: the q replicas
    share groups out. `micro_batch`: samples of a pass, of 4 a group."""
    if dtype not in of_one_rank:
        with ranks(1, 1, dtype) as alone:
            of_one_rank[dtype] = three_updates(alone, groups)
    start, expected, expected_norms = of_one_rank[dtype]
    with ranks(*pair, dtype, data_parallel=shared) as group:
        before, found, norms = three_updates(group, groups, suffix_micro_batch_samples=micro_batch)
    assert all((before[name] == start[name]).all() for name in start)
    error = distance(found, expected, start)
    print(f"TP {pair[0]} over rollout TP {pair[1]}{', data parallel' * shared}, {dtype}: ||dA - dB|| / ||dA|| = {error:.1e}")
    assert error <= TOLERANCE[dtype]
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("shared", [False, True], ids=["together", "data parallel"])
def test_a_killed_rank_is_named_and_the_group_goes_on(ranks, groups, shared):
    """Killed in SUFFIX, then in UPDATE while the other rank had finished; bit for bit as if it had lived."""
    with ranks(2, 1, data_parallel=shared) as group:
        group.open(config())
        group.iterate(groups, 0)
        group.each(lambda client: client.materialize(groups, 1))
        command = group.clients[0].start_train(respond(groups, seed=1), 1)
        group.kill(1)
        if shared:
            assert group.clients[0].watch(command).error is None, "no group of its own needs the other rank"
        else:
            with pytest.raises(Aborted, match=r"trainer rank 1 died in SUFFIX \(train_suffix\)") as caught:
                raise group.clients[0].watch(command).error
            assert caught.value.reason == "PEER_LOST"
            assert (caught.value.metadata["rank"], caught.value.metadata["phase"]) == ("1", "suffix")
        group.replace(1)
        group.open(config(), attach=True, snapshot=1)
        group.each(lambda client: client.materialize(groups, 1))
        group.each(lambda client: client.train(respond(groups, seed=1), 1))
        norm = group.each(lambda client: client.measure())[0].grad_norm
        group.each(lambda client: client.quiesce())
        order = group.begin(1, norm)
        group.clients[0].apply(order, 1)
        group.kill(1)
        group.replace(1)
        group.open(config(), attach=True, snapshot=1, bind=False)
        group.each(lambda client: client.apply(order, 1))
        group.publish(order, 1)
        found = group.actor(2)
    with ranks(2, 1, data_parallel=shared) as unbroken:
        unbroken.open(config())
        unbroken.iterate(groups, 0)
        unbroken.iterate(groups, 1)
        expected = unbroken.actor(2)
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("fields", [{"train_tp": 2, "rollout_tp": 2}, {"train_tp": 4, "rollout_tp": 2, "data_parallel": True}],
                         ids=["together", "data parallel"])
def test_a_rank_that_falls_behind_is_named(ranks, mesh, groups, tmp_path, fields):
    """Afterwards the group goes on under the next epoch, and exports what its ranks, or those of a replica, hold together."""
    with ranks(**fields, collective_timeout_s=20.0) as group:
        group.open(config())
        group.each(lambda client: client.materialize(groups, 0))
        command = group.clients[0].start_train(respond(groups), 0)
        with pytest.raises(DeadlineExceeded, match=r"SUFFIX \(train_suffix\).* rank 1 is at OVERLAP") as caught:
            raise group.clients[0].watch(command).error
        behind = ",".join(map(str, range(1, group.size)))
        assert (caught.value.reason, caught.value.metadata["rank"]) == ("COLLECTIVE_TIMEOUT", behind)
        group.join()
        group.iterate(groups, 0)
        group.each(lambda client: client.export(tmp_path / "export", 1))
        whole = group.actor(1)
    model = read_model_config(mesh.checkpoint)
    views = {name: torch.zeros_like(values) for name, values in whole.items()}
    load_into(tmp_path / "export", model, views)
    assert all(torch.equal(views[name][:model.vocab_size], values[:model.vocab_size]) for name, values in whole.items())
