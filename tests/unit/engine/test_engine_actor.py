import os

import pytest
import torch
from fake_session import FakeSession

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.engine.actor import ActorMapping
from rollplex.engine.layout_hash import layout_hash
from rollplex.memory.host_driver import sealed_memfd
from rollplex.model import ActorLayout, read_model_config


@pytest.fixture(scope="module")
def config(tiny):
    return read_model_config(tiny)


@pytest.fixture
def session(config):
    session = FakeSession()
    size = ActorLayout.build(config, 1, "float32").size_bytes
    for name, size_bytes in (("actor", size), ("other", size), ("small", 4096)):
        fd = sealed_memfd(name, size_bytes)
        session.add(name, fd, size_bytes, "host:0")
        os.close(fd)
    yield session
    session.close()


@pytest.fixture
def actor(session, config):
    mapping = ActorMapping(session, ActorLayout.build(config, 1, "float32"), "host:0")
    mapping.open("actor")
    yield mapping
    mapping.close()


def modes(session):
    return [lease.mode for lease in session.leases]


def test_views_keep_their_addresses_through_an_update(session, actor):
    views = actor.views()
    addresses = {name: view.data_ptr() for name, view in views.items()}
    actor.bind_for_update(None)
    for number, view in enumerate(views.values()):
        view.fill_(number)
    actor.unbind()
    inode = actor.bind(0)
    assert inode == actor.inode == session.slabs["actor"][0].inode
    assert not actor.writable
    assert modes(session) == [LeaseMode.READ]
    for number, view in enumerate(views.values()):
        assert torch.equal(view, torch.full_like(view, number))
    actor.bind_for_update(7)
    assert actor.writable
    assert modes(session) == [LeaseMode.WRITE]
    assert session.leases[0].expected["update_epoch"] == 7
    assert {name: view.data_ptr() for name, view in actor.views().items()} == addresses
    assert all(addresses[name] == actor.address + actor.layout.tensors[name].offset_bytes for name in addresses)


def test_a_refused_bind_leaves_what_was_bound(session, actor):
    actor.bind(0)
    with pytest.raises(WrongState):
        actor.bind(1)
    assert actor.bound
    assert modes(session) == [LeaseMode.READ]
    float(actor.views()["language_model.model.norm.weight"].sum())  # still mapped


def test_unbind_drops_the_lease_and_is_idempotent(session, actor):
    actor.bind(0)
    actor.unbind()
    actor.unbind()
    assert (actor.inode, actor.bound, session.leases) == (0, False, [])


def test_opening_another_slab_leaves_the_first(session, actor):
    actor.bind(0)
    actor.open("actor")
    assert actor.bound
    actor.open("other")
    assert not actor.bound
    assert actor.bind(0) == session.slabs["other"][0].inode


def test_a_slab_of_another_layout_is_refused(session, actor):
    actor.open("small")
    with pytest.raises(WrongState) as caught:
        actor.bind(0)
    assert caught.value.reason == "LAYOUT_MISMATCH"
    assert session.leases == []


def test_nothing_to_bind_before_open(session, config):
    mapping = ActorMapping(session, ActorLayout.build(config, 1, "float32"), "host:0")
    with pytest.raises(WrongState) as caught:
        mapping.bind(0)
    assert caught.value.reason == "NO_RUN"
    mapping.close()


def test_layout_hash_differs_with_dtype_and_degree(config):
    hashes = {layout_hash(config, ActorLayout.build(config, tp, dtype))
              for tp, dtype in ((1, "float32"), (1, "bfloat16"), (2, "float32"))}
    assert len(hashes) == 3
    assert layout_hash(config, ActorLayout.build(config, 1, "float32")) in hashes
