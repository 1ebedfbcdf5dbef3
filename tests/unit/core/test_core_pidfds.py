"""Waiting for a process by its descriptor."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys

from rollplex.core.pidfds import ended_within

HIGH = 1500


def test_a_pidfd_is_waited_for_whatever_its_number():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HIGH), hard))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    try:
        assert not ended_within(high, 0.01)
        process.stdin.close()
        assert ended_within(high, 60.0)
    finally:
        for number in (descriptor, high):
            os.close(number)
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
