"""What may not pass for a slab's memory, and who may not use the sockets."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from pathlib import Path

import pytest

from rollplex.broker.slabs import check_memfd
from rollplex.core.errors import BadInput, Forbidden
from rollplex.memory.host_driver import sealed_memfd
from rollplex.memory.slab import Slab
from rollplex.rpc import handles

SLAB = Slab("s", "gradients", "trainer", "host", 100)


def unsealed():
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    return fd


def write_sealed():
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def regular_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    return os.open(path, os.O_RDWR)


def read_only():
    fd = sealed_memfd("s", 100)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return reader


@pytest.mark.parametrize(("make", "what"), [
    (unsealed, "not sealed against shrinking"), (write_sealed, "sealed against writing"), (read_only, "not open for"),
    (lambda: sealed_memfd("s", 101), "101 bytes, 100 were announced"), (lambda: os.pipe()[0], "no memfd"),
    (lambda: socket.socket().detach(), "no memfd"), (lambda: os.open("/dev/null", os.O_RDWR), "no memfd"),
    (None, "no memfd")], ids=["unsealed", "write-sealed", "read-only", "size", "pipe", "socket", "device", "file"])
def test_refused(make, what, tmp_path):
    fd = make() if make else regular_file(tmp_path)
    with pytest.raises(BadInput, match=what):
        check_memfd(SLAB, fd)
    os.close(fd)


def test_decoded_frames_may_be_sealed_against_writing():
    fd = write_sealed()
    assert check_memfd(Slab("s", "media", "coordinator", "host", 100), fd)
    os.close(fd)


def test_accepted():
    fd = sealed_memfd("s", 100)
    assert check_memfd(SLAB, fd) == os.fstat(fd).st_ino
    os.close(fd)


def test_another_uid_is_refused(monkeypatch):
    handles.check_peer(handles.Peer(os.getpid(), os.getuid()))
    with pytest.raises(Forbidden, match=f"uid {os.getuid() + 1}"):
        handles.check_peer(handles.Peer(os.getpid(), os.getuid() + 1))
    with pytest.raises(Forbidden, match="PID namespace"):
        handles.check_peer(handles.Peer(0, os.getuid()))


def test_frames_carry_one_descriptor_and_survive_nothing_else():
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    handles.send_frame(one, {"op": "x"}, read)
    message, fd = handles.recv_frame(two)
    assert message == {"op": "x"}
    assert os.path.sameopenfile(fd, read)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    pipes = {Path(f"/proc/self/fd/{end}").readlink() for end in (read, write)}

    def held() -> int:
        links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(link.readlink() in pipes for link in links)

    before = held()
    bad = (b"{", b"[]", b"null", b"\xff", b"[" * 60000, b'{"x":NaN}', b'{"x":1e999}', b"{}" + b" " * handles.MAX_FRAME_BYTES)
    for data in bad:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        handles.send_data(one, data, write)
        with pytest.raises(BadInput):
            handles.recv_frame(two)
    one.sendmsg([b"{}"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write, read]))])
    with pytest.raises(BadInput, match="more than one descriptor"):
        handles.recv_frame(two)
    assert held() == before, "descriptors of bad frames are closed"
    with pytest.raises(BadInput, match="at most"):
        handles.send_frame(one, {"x": "y" * handles.MAX_FRAME_BYTES})
    one.close()
    assert handles.recv_frame(two) is None
    for end in (fd, read, write):
        os.close(end)
    two.close()


def test_error_frames_keep_kind_reason_and_numbers():
    with pytest.raises(Forbidden, match="no") as caught:
        handles.raise_error_frame(handles.error_frame(Forbidden("no", reason="PEER_UID", uid=5)))
    assert (caught.value.reason, caught.value.metadata) == ("PEER_UID", {"uid": "5"})
    handles.raise_error_frame({"ok": True})


def test_a_socket_in_use_is_named_and_a_stale_one_replaced(tmp_path):
    path = tmp_path / "s.sock"
    first = handles.listen(path)
    with pytest.raises(BadInput, match="in use"):
        handles.listen(path)
    first.close()
    second = handles.listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    second.close()
