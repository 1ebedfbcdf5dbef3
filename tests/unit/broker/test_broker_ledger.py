from __future__ import annotations

import pytest

from rollplex.broker.ledger import LedgerBook, slab_residency
from rollplex.core.phases import Phase
from rollplex.core.residency import Residency
from rollplex.core.work import ResidencyEntry
from rollplex.memory.slab import LedgerRow, Slab


def slab(name, object_class, role, size_bytes, run="r"):
    return Slab(name, object_class, role, "host", size_bytes, run=run)


@pytest.fixture
def book():
    ledger = LedgerBook()
    ledger.enter("r", 0, Phase.OVERLAP)
    return ledger


def test_rows_add_up_by_class_and_filter_by_run(book):
    book.add(slab("a", "media", "coordinator", 10))
    book.add(slab("b", "media", "coordinator", 20))
    book.add(slab("c", "media", "coordinator", 40, run="other"))
    assert book.rows() == (LedgerRow("media", "coordinator", "host", "unspecified", 70, 3, "pinned"),)
    assert book.rows("r") == (LedgerRow("media", "coordinator", "host", "unspecified", 30, 2, "pinned"),)
    assert book.rows("other")[0].size_bytes == 40
    book.remove(slab("a", "media", "coordinator", 10))
    book.remove(slab("b", "media", "coordinator", 20))
    assert book.rows("r") == ()
    book.remove(slab("c", "media", "coordinator", 40, run="other"))
    assert (book.rows(), book.accounts) == ((), {})


def test_reports_replace_each_other_and_end_with_the_session(book):
    book.report("rollout-0#1", (ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 100, 150),))
    book.report("rollout-1#2", (ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 10, 10),))
    assert book.rows() == (LedgerRow("rollout_kv", "rollout", "host", "unspecified", 110, 0, "hbm"),)
    book.report("rollout-0#1", (ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 50, 50),))
    assert book.rows("r")[0].size_bytes == 60
    assert book.rows("other") == ()
    book.forget("rollout-0#1")
    assert book.rows()[0].size_bytes == 10
    assert book.peak_rows() == (LedgerRow("rollout_kv", "rollout", "host", "overlap", 150, 0, "hbm"),)


def test_peaks_by_phase_start_with_what_is_held(book):
    book.add(slab("a", "optimizer_state", "trainer", 10))
    book.enter("r", 0, Phase.SUFFIX)
    book.add(slab("b", "optimizer_state", "trainer", 5))
    book.remove(slab("b", "optimizer_state", "trainer", 5))
    assert [(row.phase, row.size_bytes) for row in book.peak_rows("r")] == [("overlap", 10), ("suffix", 15)]
    assert book.peak_rows("other") == ()
    book.enter("next", 0, Phase.OVERLAP)
    assert [(row.phase, row.size_bytes) for row in book.peak_rows()] == [("overlap", 10)]


def test_violations_of_the_phase_that_ended(book):
    book.add(slab("m", "media", "coordinator", 10))
    book.report("rollout-0#1", (ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 7, 7),))
    wrong = book.enter("r", 0, Phase.UPDATE)
    assert wrong == ("rollout_kv: 7 bytes hbm on host in phase update",)
    assert book.enter("r", 0, Phase.UPDATE) == wrong, "a retried call gets the same answer"
    book.forget("rollout-0#1")
    book.report("trainer-0#2", (ResidencyEntry("optimizer_state", "trainer", "host", "hbm", 9, 9),))
    assert book.enter("", -1, Phase.IDLE) == ("optimizer_state: 9 bytes hbm on host in phase idle",)
    book.forget("trainer-0#2")
    assert book.enter("r", 1, Phase.OVERLAP) == ()


def test_a_violation_goes_with_who_held_it_and_none_comes_meanwhile(book):
    kv = ResidencyEntry("rollout_kv", "rollout", "cuda:0", "hbm", 7, 7)
    book.report("rollout-0#1", (kv,))
    wrong = "rollout_kv: 7 bytes hbm on cuda:0 in phase suffix"
    assert book.enter("r", 0, Phase.SUFFIX, found=("grown",)) == (wrong, "grown")
    book.report("trainer-0#2", (ResidencyEntry("optimizer_state", "trainer", "cuda:0", "hbm", 9, 9),))
    assert book.enter("r", 0, Phase.SUFFIX) == (wrong, "grown")
    book.forget("rollout-0#1")
    assert book.enter("r", 0, Phase.SUFFIX) == ("grown",)
    book.report("rollout-0#3", (kv,))
    assert book.enter("r", 0, Phase.SUFFIX) == ("grown",)


def test_what_engines_report_must_suit_the_phase_that_begins(book):
    """Slabs are judged at the end of a phase only: what may be parked has until then to go."""
    kept = ResidencyEntry("boundary_trainer", "trainer", "cuda:0", "hbm", 5, 5)
    book.add(Slab("g", "gradients", "trainer", "cuda:0", 9, run="r"))
    book.report("rollout-0#1", (ResidencyEntry("rollout_kv", "rollout", "cuda:0", "hbm", 7, 7),))
    book.report("trainer-0#2", (kept,))
    assert book.enter("r", 0, Phase.SUFFIX) == (
        "gradients: 9 bytes hbm on cuda:0 in phase overlap", "rollout_kv: 7 bytes hbm on cuda:0 in phase suffix")
    book.report("rollout-0#1", (ResidencyEntry("rollout_kv", "rollout", "cuda:0", "hbm", 0, 7),))
    assert book.enter("r", 0, Phase.UPDATE) == ("boundary_trainer: 5 bytes hbm on cuda:0 in phase update",)
    book.forget("trainer-0#2")
    assert book.enter("r", 0, Phase.SUFFIX) == ()


@pytest.mark.parametrize(("object_class", "device", "expected"), [
    ("actor_snapshot", "host", Residency.HBM), ("actor_snapshot", "cuda:0", Residency.HBM),
    ("optimizer_state", "host", Residency.PINNED), ("media", "host", Residency.PINNED),
    ("gradients", "host", Residency.PINNED), ("gradients", "cuda:0", Residency.HBM),
    ("gradients", "host:0", Residency.HBM), ("optimizer_state", "host:1", Residency.HBM),
    ("pinned_pool", "host", Residency.PINNED)])
def test_residency_of_slabs(object_class, device, expected):
    assert slab_residency(object_class, device) is expected


def test_the_table_has_every_row(book):
    book.add(slab("a", "media", "coordinator", 1234567))
    book.report("x#1", (ResidencyEntry("rollout_kv", "rollout", "host", "hbm", 5, 5),))
    lines = book.table().splitlines()
    assert len(lines) == 3
    assert "1,234,567" in lines[1]
    assert lines[2].split() == ["rollout_kv", "rollout", "host", "hbm", "5", "-"]
