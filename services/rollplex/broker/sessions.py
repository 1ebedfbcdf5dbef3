"""Sessions on the handle socket: who is connected, and who left without saying that nothing is mapped any more."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.core.errors import Aborted, BadInput, InternalError, NotFound
from rollplex.core.ids import new_id
from rollplex.core.leases import Lease
from rollplex.rpc.handles import has_exited, wait_readable

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}")


class Connection(Protocol):
    """A session's end of the handle socket."""

    def hang_up(self) -> None: ...

    def is_lost(self) -> bool:
        """Whether the peer has closed its end, read or not."""
        ...


class NoConnection:
    """Of a session that an earlier broker had."""

    def hang_up(self) -> None:
        return

    def is_lost(self) -> bool:
        return True


@dataclass(eq=False, slots=True)
class Session:
    name: str
    """`trainer-0#3`: process and serial number, in messages and lease tables. No secret."""
    process: str
    role: str
    pid: int
    pidfd: int
    """Owned by the session."""
    secret: str = field(repr=False)
    """What gRPC calls name the session by."""
    connection: Connection
    left: dict[str, Lease] = field(default_factory=dict)
    """By id: leases of a connection that ended without a goodbye."""
    inherited: bool = False
    """Left by the connection to an earlier broker."""


def check_names(process: object, role: object) -> tuple[str, str]:
    for what, value in (("process", process), ("role", role)):
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise BadInput(f"{what} {value!r} must be 1-63 of a-z, 0-9, '_', '.' and '-', from a letter on",
                           reason="BAD_PROCESS_NAME")
    return str(process), str(role)


@dataclass(slots=True)
class SessionTable:
    by_secret: dict[str, Session] = field(default_factory=dict)
    by_process: dict[str, Session] = field(default_factory=dict)
    former: list[Session] = field(default_factory=list)
    """Not connected, `left` not empty, not seen dead yet."""
    serial: int = 0

    def get(self, secret: str) -> Session:
        session = self.by_secret.get(secret)
        if session is None:
            raise NotFound("no such session; its connection to the handle socket has ended", reason="SESSION_NOT_FOUND")
        return session

    def open(self, process: str, role: str, pid: int, pidfd: int, connection: Connection) -> Session:
        """A process has one session. Raises Aborted while another live process of that name has it."""
        old = self.by_process.get(process)
        if old is not None:
            raise Aborted(f"{process} is connected already, as pid {old.pid}; stop that process first",
                          reason="PROCESS_NAME_IN_USE", process=process, pid=old.pid)
        self.serial += 1
        session = Session(f"{process}#{self.serial}", process, role, pid, pidfd, new_id("session"), connection)
        self.by_secret[session.secret] = self.by_process[process] = session
        return session

    def superseded(self, process: str) -> Session | None:
        """The session of this name whose end is near but not seen yet: its process or its connection is gone."""
        old = self.by_process.get(process)
        return old if old is not None and (old.connection.is_lost() or has_exited(old.pidfd)) else None

    def close(self, session: Session) -> None:
        """The connection is gone. Idempotent."""
        self.by_secret.pop(session.secret, None)
        if self.by_process.get(session.process) is session:
            del self.by_process[session.process]

    def live_with_pid(self, pid: int) -> Session | None:
        return next((session for session in self.by_secret.values() if session.pid == pid), None)

    def leaving(self, session: Session, leases: list[Lease], *, inherited: bool = False) -> None:
        """Remembers what a vanished connection held until its process is dead or has released it."""
        session.left = {lease.lease_id: lease for lease in leases}
        session.inherited = inherited
        self.former.append(session)

    def take_dead(self) -> list[Session]:
        """Removes and returns the former sessions whose processes have exited."""
        dead = [session for session in self.former if has_exited(session.pidfd)]
        self.former = [session for session in self.former if session not in dead]
        return dead

    def take_gone(self, pid: int) -> list[Session]:
        """Removes and returns the former sessions of a process that is known to be gone."""
        gone = [session for session in self.former if session.pid == pid and has_exited(session.pidfd)]
        self.former = [session for session in self.former if session not in gone]
        return gone

    def take_resumable(self, process: str, pid: int) -> list[Session]:
        """Removes and returns the former sessions of the very process that has connected again."""
        its = [session for session in self.former if (session.process, session.pid) == (process, pid)]
        self.former = [session for session in self.former if session not in its]
        return its


def forget_pidfd(session: Session) -> None:
    os.close(session.pidfd)


async def kill_and_wait(session: Session, timeout_s: float) -> None:
    """SIGKILL, which also ends a stopped process, then its exit. Raises Aborted when the exit is not seen in time."""
    if session.pid == os.getpid():
        raise InternalError(f"{session.name} would be fenced, but it is the broker's own process")
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(session.pidfd, signal.SIGKILL)
    try:
        await wait_readable(session.pidfd, timeout_s)
    except TimeoutError:
        raise Aborted(f"{session.process} (pid {session.pid}) left without releasing its leases and did not die within "
                      f"{timeout_s:g} s of SIGKILL", reason="NOT_FENCED", pid=session.pid) from None
