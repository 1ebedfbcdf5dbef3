"""What a stranger's bytes reach first, each as a function of bytes that raises only for a defect.

atheris drives them in `run.py`; `test_fuzz_corpus.py` gives them seeded inputs without it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from rollplex.broker.engine import Custody
from rollplex.broker.handle_server import HandleServer
from rollplex.broker.keeper import Keeper
from rollplex.broker.records import NoVault
from rollplex.broker.sessions import NoConnection
from rollplex.broker.tickets import Purpose, TicketBook
from rollplex.coordinator.run_config import read_config
from rollplex.coordinator.servicer import read_row
from rollplex.core.config import RunConfig
from rollplex.core.errors import BadInput, Forbidden, NotFound, RollplexError
from rollplex.core.strict import parse, to_plain
from rollplex.core.topology import Topology
from rollplex.data import plan
from rollplex.data.datasets import build_row
from rollplex.data.decode_frames import MediaFault, decode
from rollplex.data.limits import MediaLimits
from rollplex.data.media_columns import MediaSource
from rollplex.data.row_formats import QUESTION_TEMPLATE, TYPE_TEMPLATES, RowOptions
from rollplex.data.rows import PROBLEM_TYPES, MediaRef, check_row
from rollplex.rpc import handles
from rollplex.v1 import coordinator_service_pb2 as pb


def finish(coroutine: Any) -> Any:
    """The value of a coroutine that never waits: an event loop for each input would be most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited for something")


class _Broker:
    def __init__(self) -> None:
        self.custody = Custody(NoVault(), host_limit_bytes=1 << 20)
        self.server = HandleServer(Path("/nowhere"), self.custody)
        self.session, _ = self.custody.hello("fuzz", "trainer", os.getpid(), os.pidfd_open(os.getpid()), NoConnection())
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.own_fd = os.memfd_create("fuzz")


_broker: list[_Broker] = []


def handle_frames(data: bytes) -> None:
    """A packet on the handle socket, the first byte's low bit deciding whether a descriptor comes with it."""
    if not _broker:
        _broker.append(_Broker())
    rig, body = _broker[0], data[1:] or b" "
    handles.send_data(rig.theirs, body, rig.own_fd if data[:1] and data[0] & 1 else None)
    try:
        frame = handles.recv_frame(rig.ours)
    except BadInput:
        return
    assert frame is not None
    # As a client reads an answer, and as the broker reads a request: the hello, then any other.
    with contextlib.suppress(RollplexError):
        handles.raise_error_frame(frame[0])
    with contextlib.suppress(BadInput):
        assert handles.decode(handles.encode(frame[0])) == frame[0]
    with contextlib.suppress(RollplexError):
        reply, fd = finish(rig.server._handle(rig.session, frame))
        handles.encode(reply)
        assert fd is None, "a ticket was guessed"


class _Keeper:
    def __init__(self) -> None:
        self.keeper = Keeper(Path(tempfile.mkdtemp(prefix="fuzz-")) / "k.sock")
        self.own_fd = os.memfd_create("fuzz")


_keeper: list[_Keeper] = []


def keeper_frames(data: bytes) -> None:
    """Packets on the keeper's socket, cut at newlines, each with a descriptor or without. What it is given it may keep."""
    if not _keeper:
        _keeper.append(_Keeper())
    keeper, rig = _keeper[0].keeper, _keeper[0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.settimeout(0)
        keeper._connections[ours.fileno()] = ours
        keeper._poll.register(ours, select.POLLIN)
        for packet in data.split(b"\n")[:8]:
            if packet and ours.fileno() >= 0:
                handles.send_data(theirs, packet[1:] or b" ", rig.own_fd if packet[0] & 1 else None)
                keeper._serve(ours)
    finally:
        if ours.fileno() >= 0:
            keeper._close(ours)
        theirs.close()
        for name, (metadata, _, _) in list(keeper._records.items()):
            assert isinstance(name, str) and isinstance(metadata, dict)
            keeper._drop(name)


def tickets(data: bytes) -> None:
    """Orders on a ticket book, beside a model of what must come out: bytes are (order, argument) pairs."""
    book, now = TicketBook(lifetime_s=10.0), 0.0
    issued: list[tuple[str, Purpose, str, float]] = []
    open_tickets: set[str] = set()
    purposes = (Purpose.DEPOSIT, Purpose.REDEEM)
    for order, argument in zip(data[::2], data[1::2]):
        purpose, session = purposes[argument & 1], f"s{argument >> 1 & 3}"
        match order % 5:
            case 0:
                ticket = book.issue(purpose, "subject", session, now)
                issued.append((ticket, purpose, session, now + 10.0))
                open_tickets.add(ticket)
            case 1 | 2 if issued:
                ticket, real_purpose, real_session, expires_s = issued[order // 5 % len(issued)]
                if order % 5 == 2:
                    ticket = ticket[:-1] + ("0" if ticket[-1] != "0" else "1")
                good = (ticket in open_tickets and purpose is real_purpose and session == real_session and now <= expires_s)
                try:
                    book.redeem(ticket, purpose, session, now)
                    assert good, "a ticket that is not good was redeemed"
                    open_tickets.discard(ticket)
                except Forbidden:
                    assert not good, "a good ticket was refused"
            case 3:
                now += argument / 16
            case 4:
                gone = (book.drop_session(session) if argument & 128 else book.expire(now))
                open_tickets &= set(book.claims)
                assert len(gone) >= 0
    assert open_tickets == set(book.claims)


class _NoRecordings:
    async def config(self, run: str, given: dict[str, Any]) -> dict[str, Any]:
        raise NotFound(f"no recording of {run}")


_TOPOLOGY = Topology(1, 1)


def run_config(data: bytes) -> None:
    """A run's options as a client sends them; what is accepted is finite and reads back as itself."""
    try:
        config = finish(read_config(data.decode(errors="replace"), _NoRecordings(), _TOPOLOGY))
    except RollplexError:
        return
    plain = to_plain(config)
    assert parse(RunConfig, json.loads(json.dumps(plain))) == config
    assert all(math.isfinite(value) for value in _numbers(plain)), plain


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []


_OPTIONS = RowOptions(MediaSource(Path("/media")), QUESTION_TEMPLATE, TYPE_TEMPLATES, PROBLEM_TYPES, False)
_LIMITS = MediaLimits()


def prompt_rows(data: bytes) -> None:
    """A dataset's row, and as bytes of a protobuf what a client submits: to the request that a decoding child would get."""
    for read in (_dataset_row, _submitted_row):
        try:
            row = read(data)
            check_row(row)
            if row.media:
                json.dumps(plan.request(row.media, _LIMITS, 28), allow_nan=False)
        except (RollplexError, DecodeError):
            continue


def _dataset_row(data: bytes) -> Any:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise BadInput("no JSON") from None
    return build_row(raw, 0, "auto", _OPTIONS)


def _submitted_row(data: bytes) -> Any:
    return read_row(0, pb.PromptGroup.FromString(data))


def media_headers(data: bytes) -> None:
    """A media file in the decoder's code, small limits; memory and time are the child's limits, not of this target."""
    limits = MediaLimits(max_source_pixels=256 * 256, max_source_frames=64, max_frames=4, min_frames=2)
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data[1:])
        item = plan.request([MediaRef("video" if data[:1] and data[0] & 1 else "image", "x")], limits, 28)["items"][0]
        with warnings.catch_warnings(), contextlib.suppress(MediaFault, MemoryError):
            warnings.simplefilter("ignore")
            clip = decode(item, [fd], 1 << 24)
            assert all(frame.dtype == "uint8" and frame.ndim == 3 for frame in clip.frames)
    finally:
        os.close(fd)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "handle_frames": handle_frames, "keeper_frames": keeper_frames, "tickets": tickets,
    "run_config": run_config, "prompt_rows": prompt_rows,
    "media_headers": media_headers,
}


def run_one(target: Callable[[bytes], None], data: bytes) -> None:
    """`target` on bytes; also asserts that no descriptor stays open, by the lowest free number."""
    before = _lowest_free_fd()
    target(data)
    assert _lowest_free_fd() == before, "a descriptor was left open"


def _lowest_free_fd() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


__all__ = ["TARGETS", "run_one"]
