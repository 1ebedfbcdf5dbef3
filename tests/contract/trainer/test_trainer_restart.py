"""Trainers that end, or are killed, and come back to their slabs."""

import signal

import pytest
from trainer_rig import config, respond

from rollplex.core import work
from rollplex.core.errors import NotFound


@pytest.fixture
def unbroken(serve, groups):
    """The actor after two iterations of a trainer that was left alone."""
    with serve() as (client, _):
        client.run, client.slab = f"{client.run}-unbroken", f"runs/{client.run}-unbroken/actor/host:0"
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
        client.iterate(groups, 1)
        return client.actor_bytes(2)


def test_attach_gives_the_next_update_bit_for_bit(serve, groups, unbroken):
    with serve() as (client, _):
        client.open(config())
        client.bind(0)
        client.iterate(groups, 0)
    with serve() as (client, engine):
        result = client.open(config(), attach=True, snapshot=1)
        assert result.snapshot == 1 and engine._state.optimizer.optimizer_step == 1
        client.bind(1)
        client.iterate(groups, 1)
        assert client.actor_bytes(2) == unbroken


def test_attach_to_nothing_is_not_found(serve):
    with serve() as (client, _), pytest.raises(NotFound):
        client.open(config(), attach=True, snapshot=0)


@pytest.mark.parametrize("gradients", ["host", "hbm"])
def test_killed_in_suffix_and_before_the_update(spawn, groups, unbroken, gradients):
    """A process killed with half of its gradient summed, then one killed after UPDATE_BEGIN; nothing is lost, wherever the
    gradients are."""
    place = f"trainer.gradients={gradients}"
    with spawn(place) as (client, process):
        client.open(config())
        client.bind(0)
        client.materialize(groups, 0)
        client.train(respond(groups, seed=0)[:2], 0)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with spawn(place) as (client, process):
        client.open(config(), attach=True, snapshot=0)
        client.bind(0)
        client.iterate(groups, 0)
        client.materialize(groups, 1)
        client.train(respond(groups, seed=1), 1)
        clip = min(1.0, 0.5 / client.measure().grad_norm)
        client.quiesce()
        epoch = client.begin(1)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with spawn(place) as (client, _):
        client.open(config(), attach=True, snapshot=1)
        client.apply(work.UpdateOrder(epoch, clip, 1.0, 2), 1)
        client.session.publish_snapshot(client.run, epoch, 2)
        client.bind(2)
        assert client.actor_bytes(2) == unbroken
        left = [slab.name for slab in client.session.list_slabs(f"runs/{client.run}/") if slab.object_class == "gradients"]
        assert bool(left) == (gradients == "host")
