"""Counting descriptors, mappings and threads of a real process, and what counts as a leak."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time

from rollplex_client.chaos.leaks import ANONYMOUS, Snapshot, count_mappings, count_process, difference, kind_of, snapshot, totals
from rollplex_client.results import LedgerEntry, Mesh


def test_what_is_opened_mapped_and_started_is_found_and_gone_again():
    before = snapshot({"me": os.getpid()})
    fd = os.memfd_create("rollplex:runs/run-7/media/iteration-3/12")
    os.ftruncate(fd, 4096)
    mapped = mmap.mmap(fd, 4096)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    reader, writer = os.pipe()
    try:
        found = difference(before, snapshot({"me": os.getpid()}))
    finally:
        gate.set()
        thread.join()
        mapped.close()
        for descriptor in (fd, reader, writer):
            os.close(descriptor)
    media = "memfd:rollplex:runs/*/media/iteration-#/#"
    # mmap.mmap keeps a descriptor of its own.
    assert f"me: descriptors of {media}: 0 -> 2" in found
    assert f"me: mappings of {media}: 0 -> 1" in found
    assert any("descriptors of pipe" in line for line in found)
    assert any("threads of" in line for line in found)
    # The system takes a thread off its list a moment after join.
    deadline = time.monotonic() + 10.0
    while (left := difference(before, snapshot({"me": os.getpid()}))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def test_another_process_of_the_name_is_not_compared_and_a_dead_one_is_left_out():
    first = Snapshot({"a": count_process(os.getpid())})
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert difference(first, snapshot({"a": other.pid})) == []
    finally:
        other.kill()
        other.wait()
    assert snapshot({"a": other.pid}).processes == {}


def test_the_brokers_counts_are_compared_by_class():
    def mesh(slabs, leases):
        return Mesh((), "", "idle", (LedgerEntry("media", "coordinator", "host", "", 10, slabs),),
                    custody={"slabs": slabs, "leases": leases, "tickets": 9 * leases})

    before, after = snapshot({}, mesh(1, 3)), snapshot({}, mesh(2, 3))
    assert difference(before, after) == ["broker: slabs: 1 -> 2", "broker: slabs/media: 1 -> 2"]
    assert difference(after, before) == []
    assert totals(after)["custody"] == {"slabs": 2, "leases": 3, "slabs/media": 2}


def test_mappings_are_told_by_what_they_point_at():
    text = ("7f00-7f01 r--p 00000000 00:00 0 \n"
            "7f01-7f02 rw-s 00000000 00:01 77 /memfd:rollplex:runs/a/actor/host:0 (deleted)\n"
            "7f02-7f03 rw-p 00000000 00:00 0 [heap]\n"
            "7f03-7f04 r-xp 00000000 08:01 5 /usr/lib/lib c.so\n")
    assert count_mappings(text) == {ANONYMOUS: 2, "memfd:rollplex:runs/*/actor/host:#": 1, "/usr/lib/lib c.so": 1}
    assert (kind_of("socket:[12]"), kind_of("anon_inode:[eventpoll]")) == ("socket", "eventpoll")
