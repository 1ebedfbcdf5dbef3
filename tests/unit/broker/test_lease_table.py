"""Every state x event of the lease table: who holds what, and who may join."""

from __future__ import annotations

import itertools

import pytest

from rollplex.core.errors import Aborted, NotFound
from rollplex.core.leases import Lease, LeaseMode, LeaseTable

READ, WRITE = LeaseMode.READ, LeaseMode.WRITE
KINDS = [(READ, None), (WRITE, None), (WRITE, 1), (WRITE, 2)]
ADMITTED = {((READ, None), (READ, None)), ((WRITE, 1), (WRITE, 1)), ((WRITE, 2), (WRITE, 2))}
"""All pairs (held by one session, wanted by another) that may stand side by side."""


def lease(lease_id, session, kind, slab="s"):
    return Lease(lease_id, slab, session, *kind)


@pytest.mark.parametrize(("held", "wanted"), list(itertools.product(KINDS, KINDS)))
def test_two_sessions(held, wanted):
    table = LeaseTable()
    table.grant(lease("a", "one#1", held))
    if (held, wanted) in ADMITTED:
        table.grant(lease("b", "two#2", wanted))
        assert len(table.on_slab("s")) == 2
        return
    with pytest.raises(Aborted, match=r"excluded by one#1") as caught:
        table.grant(lease("b", "two#2", wanted))
    assert caught.value.reason == "LEASE_CONFLICT"
    assert [held.lease_id for held in table.on_slab("s")] == ["a"]


@pytest.mark.parametrize(("held", "wanted"), list(itertools.product(KINDS, KINDS)))
def test_a_session_never_excludes_itself_and_other_slabs_do_not_matter(held, wanted):
    table = LeaseTable()
    table.grant(lease("a", "one#1", held))
    table.grant(lease("b", "one#1", wanted))
    table.grant(lease("c", "two#2", wanted, slab="other"))
    assert len(table.by_id) == 3


def test_release():
    table = LeaseTable()
    table.grant(lease("a", "one#1", (READ, None)))
    with pytest.raises(NotFound):
        table.release("a", "two#2")
    assert table.release("a", "one#1")
    assert not table.release("a", "one#1")
    table.grant(lease("b", "two#2", (WRITE, None)))


def test_the_end_of_a_session_drops_all_its_leases():
    table = LeaseTable()
    for index, slab in enumerate("xyz"):
        table.grant(lease(str(index), "one#1", (READ, None), slab))
    table.grant(lease("other", "two#2", (READ, None), "x"))
    assert {dropped.slab for dropped in table.release_session("one#1")} == set("xyz")
    assert list(table.by_id) == ["other"]
    assert table.release_session("one#1") == []
