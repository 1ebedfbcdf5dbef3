"""The decoding child's confinement, in a child of the test: what it can still do, and what the kernel refuses it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex.data import confine
from rollplex.data.decode_process import DecodeProcess
from rollplex.data.decoder import MediaDecoder

REFUSED = {
    "a socket": "socket.socket()",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "a new file": "open(sys.argv[1] + '/new', 'w')",
    "an old file for writing": "open(sys.argv[1] + '/old', 'r+')",
    "appending": "open(sys.argv[1] + '/old', 'a')",
    "a nameless file": "os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR)",
    "truncating": "os.truncate(sys.argv[1] + '/old', 0)",
    "a directory": "os.mkdir(sys.argv[1] + '/made')",
    "a link": "os.symlink('/', sys.argv[1] + '/link')",
    "a hard link": "os.link(sys.argv[1] + '/old', sys.argv[1] + '/hard')",
    "removing": "os.unlink(sys.argv[1] + '/old')",
    "renaming": "os.rename(sys.argv[1] + '/old', sys.argv[1] + '/other')",
    "a mode": "os.chmod(sys.argv[1] + '/old', 0o777)",
    "a pipe on disk": "os.mkfifo(sys.argv[1] + '/pipe')",
    "a process": "os.fork()",
    "another program": "os.execv('/bin/true', ['true'])",
    "a signal": "os.kill(os.getppid(), 0)",
    "a pidfd": "os.pidfd_open(os.getppid())",
    "a namespace": "c('unshare', 0x10000000)",
    "tracing": "c('ptrace', 0, 0, 0, 0)",
}
ALLOWED = {
    "reading a file": "open(sys.argv[1] + '/old').read()",
    "reading a directory": "os.listdir(sys.argv[1])",
    "a memfd": "os.pwrite(os.memfd_create('m'), b'x', 0)",
    "memory": "bytearray(1 << 24)",
    "a thread": "(lambda t: (t.start(), t.join()))(threading.Thread(target=int))",
    "its own socket": "given.sendall(b'x')",
}
PROGRAM = """
import ctypes, json, os, socket, sys, threading
from rollplex.data.confine import confine
given, peer = socket.socketpair()
libc = ctypes.CDLL(None, use_errno=True)
def c(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
actions = json.loads(sys.argv[2])
assert confine()
out = {}
for name, action in actions.items():
    try:
        eval(action)
        out[name] = 0
    except OSError as error:
        out[name] = error.errno
print(json.dumps(out))
"""

needs_filters = pytest.mark.skipif(os.uname().machine not in confine.MACHINES, reason="no table of calls for this machine")


@needs_filters
def test_a_confined_process_reads_and_computes_and_nothing_else(tmp_path):
    (tmp_path / "old").write_text("content")
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(REFUSED | ALLOWED)], capture_output=True,
                           text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    assert outcome == {name: errno.EPERM for name in REFUSED} | {name: 0 for name in ALLOWED}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "content"


@needs_filters
async def test_decoding_children_are_confined():
    child = await DecodeProcess.start()
    try:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert child.confined
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    finally:
        await child.kill()


async def test_a_kernel_without_filters_is_said_so(monkeypatch, caplog):
    confined = DecodeProcess.start

    async def start(cls):
        child = await confined()
        child.confined = False
        return child

    monkeypatch.setattr(DecodeProcess, "start", classmethod(start))
    async with MediaDecoder(1):
        assert "no seccomp filters" in caplog.text


def test_every_machine_has_the_calls_that_matter():
    for name, (_, numbers) in confine.MACHINES.items():
        assert {"socket", "socketpair", "openat", "clone", "clone3", "execve", "execveat", "ptrace", "io_uring_setup",
                "openat2"} <= numbers.keys(), name
        assert len(set(numbers.values())) == len(numbers), name
