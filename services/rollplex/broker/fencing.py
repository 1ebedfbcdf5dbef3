"""Death is not quiescence: a process that vanished with leases may still map them, and is killed before others write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rollplex.broker.mps_clients import ClientList
from rollplex.broker.sessions import Session, SessionTable, kill_and_wait
from rollplex.core.errors import Aborted, Unavailable
from rollplex.core.leases import Lease

CLIENT_POLL_S = 0.05


class Fence:
    """The rules about former holders. `forget` is told of sessions that are dead, with the leases they had left."""

    def __init__(self, sessions: SessionTable, forget: Callable[[Session, Iterable[Lease]], None], *, timeout_s: float,
                 grace_s: float, clock: Callable[[], float], clients: ClientList | None = None) -> None:
        """`clients`: of the MPS daemon, where there is one; a dead process that is one still counts as mapping what it had."""
        self._sessions, self._forget, self._clock, self._clients = sessions, forget, clock, clients
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._grace_ends_s = 0.0

    def start_grace(self) -> None:
        """Called by a successor: the processes it inherited get `grace_s` to connect again."""
        self._grace_ends_s = self._clock() + self._grace_s

    def bury_dead(self) -> None:
        """Forgets former sessions whose processes are gone. With an MPS daemon it takes `clear` to know that."""
        if self._clients is None:
            self._bury(self._sessions.take_dead())

    def _bury(self, dead: Iterable[Session]) -> None:
        for session in dead:
            self._forget(session, session.left.values())

    def on_slab(self, slab: str) -> list[tuple[Session, Lease]]:
        """Former holders of a slab that are not known to be dead."""
        self.bury_dead()
        return [(session, lease) for session in self._sessions.former for lease in session.left.values()
                if lease.slab == slab]

    async def clear(self, session: Session, what: str) -> None:
        """Makes sure that a former holder maps nothing: it is dead when this returns.

        Raises Aborted when it is connected (then it can release), Unavailable while it may still connect again.
        """
        if session not in self._sessions.former:
            return
        if self._sessions.live_with_pid(session.pid) is not None:
            raise Aborted(f"{what} is excluded by {session.process} (pid {session.pid}), which lost a connection without "
                          "releasing its leases; let it release them", reason="LEASE_CONFLICT", holders=session.process)
        if session.inherited and self._clock() < self._grace_ends_s:
            raise Unavailable(f"{what} waits until {session.process} (pid {session.pid}) has connected to the restarted "
                              f"broker, at most {self._grace_s:g} s", reason="RECONNECT_GRACE")
        deadline = self._clock() + self._timeout_s
        await kill_and_wait(session, self._timeout_s)
        if self._clients is not None:
            await self._client_gone(self._clients, session, deadline)
        self._bury(self._sessions.take_gone(session.pid))

    async def _client_gone(self, clients: ClientList, session: Session, deadline: float) -> None:
        while await clients.has(session.pid):
            if self._clock() > deadline:
                raise Aborted(f"{session.process} (pid {session.pid}) is dead, but the MPS server has it as a client after "
                              f"{self._timeout_s:g} s; `rollplex restart mps` ends it", reason="NOT_FENCED", pid=session.pid)
            await asyncio.sleep(CLIENT_POLL_S)

    def release(self, lease_id: str, pid: int) -> bool:
        """The process itself says, over another connection, that it maps this no more."""
        for session in self._sessions.former:
            if session.pid == pid and session.left.pop(lease_id, None) is not None:
                self._drop_empty()
                return True
        return False

    def supersede(self, pid: int, slab: str) -> None:
        """The process leases the slab again: its new lease stands for what it maps."""
        for session in self._sessions.former:
            if session.pid == pid:
                self._discard(session, slab)
        self._drop_empty()

    def forget_slab(self, slab: str) -> None:
        for session in self._sessions.former:
            self._discard(session, slab)
        self._drop_empty()

    def _discard(self, session: Session, slab: str) -> None:
        session.left = {key: lease for key, lease in session.left.items() if lease.slab != slab}

    def _drop_empty(self) -> None:
        empty = [session for session in self._sessions.former if not session.left]
        self._sessions.former = [session for session in self._sessions.former if session.left]
        for session in empty:
            self._forget(session, ())
