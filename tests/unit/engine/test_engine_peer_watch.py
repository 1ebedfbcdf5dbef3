"""A lost peer is seen while this rank waits in a call that nothing interrupts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from rollplex.engine.peer_watch import PeerWatch


@pytest.fixture
def peer():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    yield process, pidfd
    process.kill()
    process.wait()
    os.close(pidfd)


def test_a_death_aborts_once(peer):
    process, pidfd = peer
    aborted = threading.Event()
    watch = PeerWatch({1: pidfd}, lambda rank: "", aborted.set)
    assert not aborted.wait(0.5)
    process.kill()
    assert aborted.wait(10)
    watch.close()
    assert watch.lost


def test_a_word_of_one_that_left_aborts_too(peer):
    _, pidfd = peer
    aborted, words = threading.Event(), {}
    watch = PeerWatch({1: pidfd}, lambda rank: words.get(rank, ""), aborted.set)
    words[1] = "OUT_OF_DEVICE_MEMORY: ..."
    assert aborted.wait(10)
    watch.close()


def test_closed_it_aborts_no_more(peer):
    process, pidfd = peer
    aborted = threading.Event()
    watch = PeerWatch({1: pidfd}, lambda rank: "", aborted.set)
    watch.close()
    process.kill()
    process.wait()
    assert not aborted.wait(0.5)
    assert not watch.lost
