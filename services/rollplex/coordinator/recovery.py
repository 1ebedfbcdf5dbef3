"""What the loss of a service costs before UPDATE_BEGIN: its own work, done again within the same iteration.

docs/adr/0013-recovery.md has the reasons. No grpc, no proto.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from rollplex.coordinator.mesh import Mesh
from rollplex.coordinator.peers import EngineGroup
from rollplex.coordinator.records import EventBody, Note, Run
from rollplex.core.config import RunConfig
from rollplex.core.errors import Aborted, DeadlineExceeded, RollplexError, Unavailable

T = TypeVar("T")

BROKER = "broker"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between two looks at whether a service is back; doubled each time."""
PHASE_GRACE_S = 5.0
"""Commands have the phase's deadline themselves, and say more of what was late."""


class Loss(StrEnum):
    """Whose loss an error tells of."""

    SERVICE = "service"
    ENDING = "ending"
    """The service's: it has failed, and its process ends in a moment."""
    SILENCE = "silence"
    """The service's if one of its ranks does not answer; slow work otherwise."""
    BROKER = "broker"


LOSSES: dict[str, Loss] = {
    "ENGINE_UNREACHABLE": Loss.SERVICE, "ENGINE_RESTARTED": Loss.SERVICE, "ENGINE_NOT_JOINED": Loss.SERVICE,
    "RANK_LOST": Loss.SERVICE, "PEER_LOST": Loss.SERVICE, "NO_COMMUNICATOR": Loss.SERVICE,
    "DEVICE_FAULT": Loss.ENDING, "KV_NOT_BACKED": Loss.ENDING,
    "PHASE_TIMEOUT": Loss.SILENCE, "DEADLINE_EXCEEDED": Loss.SILENCE, "COLLECTIVE_TIMEOUT": Loss.SILENCE,
    "UNAVAILABLE": Loss.BROKER, "DRAINING": Loss.BROKER, "BROKER_SILENT": Loss.BROKER, "HANDLE_SOCKET_DOWN": Loss.BROKER,
    "SESSION_NOT_FOUND": Loss.BROKER, "RECONNECT_GRACE": Loss.BROKER, "KEEPER_DOWN": Loss.BROKER,
}
"""By reason. Any other error ends the iteration: the same work would fail again."""


class Recovery:
    """The losses of one iteration. `survive` is around what must be done, `spare` around what may be left to the next one."""

    def __init__(self, mesh: Mesh, run: Run, config: RunConfig, emit: Callable[[EventBody], None]) -> None:
        self._mesh, self._run, self._config, self._emit = mesh, run, config, emit
        self._waiting = 0
        self._back_at_s = 0.0
        """When something that was lost was last back; time.monotonic."""
        self._spared: dict[EngineGroup, tuple[Loss, RollplexError]] = {}

    async def survive(self, group: EngineGroup | None, action: Callable[[], Awaitable[T]], *,
                      redo: Callable[[], Awaitable[None]] | None = None, what: Callable[[], str] = lambda: "its work",
                      restores: bool = True) -> T:
        """`action` of one service (None: of the broker), done again after a loss, once the service is back, is `ready`
        (unless `restores` is false: the action does that) and has done `redo`. `what` tells the user what is done again.

        Raises Aborted (SERVICE_FAILED_TWICE) at the second loss before the action has succeeded, Unavailable
        (SERVICE_NOT_BACK) after `recovery_timeout_s`.
        """
        heard: dict[str, RollplexError] = {}
        while True:
            try:
                if heard:
                    if group is not None and restores:
                        await self._mesh.ready(group, self._run, self._config.phase_timeout_s)
                    if redo is not None:
                        await redo()
                return await action()
            except RollplexError as error:
                loss = await _loss_of(group, error)
                if loss is None:
                    raise
                unit = group if loss is not Loss.BROKER else None
                name = unit.name if unit is not None else BROKER
                if name in heard:
                    raise self._twice(name, heard[name], error) from error
                heard[name] = error
                await self._wait(unit, loss, error, what())

    async def present(self, group: EngineGroup) -> None:
        """Joined, the run open in it, the snapshot bound."""
        await self.survive(group, lambda: self._mesh.ready(group, self._run, self._config.phase_timeout_s), restores=False,
                           what=lambda: "joining the iteration")

    async def spare(self, group: EngineGroup, action: Callable[[], Awaitable[T]]) -> T | None:
        """None when the group is lost: the iteration does without, and the next one that needs it waits for it."""
        try:
            return await action()
        except RollplexError as error:
            loss = await _loss_of(group, error)
            if loss is None:
                raise
            self._spared[group] = loss, error
            self._emit(Note("warning", "SERVICE_LOST", f"{_lost_name(group, error)} was lost in {self._mesh.phase.name}, where "
                                                       f"the iteration goes on without it: {error}"))
            return None

    async def spared_back(self) -> list[EngineGroup]:
        """Waits for the groups that were spared so far. A stopped process keeps what it holds until it is ended."""
        spared, self._spared = self._spared, {}
        for group, (loss, error) in spared.items():
            await self._wait(group, loss, error, "leaving what it held")
        return list(spared)

    async def within(self, action: Awaitable[T]) -> T:
        """A phase's work, in the phase's time; that begins anew when a lost service is back. Raises DeadlineExceeded."""
        began_s = time.monotonic()
        task = asyncio.ensure_future(action)
        try:
            while not task.done():
                left_s = self.left_s(began_s) + PHASE_GRACE_S
                if left_s <= 0:
                    break
                await asyncio.wait([task], timeout=left_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            name = self._mesh.phase.name
            raise DeadlineExceeded(f"phase {name} did not end within {self._config.phase_timeout_s:g} s",
                                   reason="PHASE_TIMEOUT", phase=name)
        return task.result()

    def left_s(self, began_s: float) -> float:
        """Of a phase's time; `began_s` is time.monotonic."""
        since_s = time.monotonic() if self._waiting else max(began_s, self._back_at_s)
        return since_s + self._config.phase_timeout_s - time.monotonic()

    async def _wait(self, group: EngineGroup | None, loss: Loss, error: RollplexError, what: str) -> None:
        name, began_s = _lost_name(group, error), time.monotonic()
        self._emit(Note("warning", "SERVICE_LOST", f"{name} was lost in {self._mesh.phase.name} ({error}); waiting up to "
                        f"{self._config.recovery_timeout_s:g} s for it to come back; then done again: {what}"))
        self._waiting += 1
        try:
            await self._until_back(group, loss, error, began_s + self._config.recovery_timeout_s)
        finally:
            self._waiting -= 1
            self._back_at_s = time.monotonic()
        self._emit(Note("info", "SERVICE_BACK", f"{name} is back after {time.monotonic() - began_s:.1f} s"))

    async def _until_back(self, group: EngineGroup | None, loss: Loss, error: RollplexError, deadline_s: float) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if group is None:
                    await self._mesh.broker(lambda session: session.ledger())
                    return
                if loss is Loss.ENDING:
                    await group.check_replaced(error.metadata.get("service", ""))
                await group.ensure_joined()
                return
            except RollplexError as failure:
                if failure.reason not in LOSSES:
                    raise
                if time.monotonic() > deadline_s:
                    name = _lost_name(group, error)
                    raise Unavailable(
                        f"{name} was lost ({error}) and did not come back within {self._config.recovery_timeout_s:g} s: "
                        f"{failure}. Look at `rollplex logs {name}`, then submit again; run.recovery_timeout_s is how long an "
                        "iteration waits", reason="SERVICE_NOT_BACK", service=name) from failure
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _twice(self, name: str, first: RollplexError, second: RollplexError) -> Aborted:
        phase, service = self._mesh.phase, name if name == BROKER else second.metadata.get("service", name)
        return Aborted(
            f"{name} failed twice in a row in {phase.name}, without having done its work in between. First: {first}. Then: "
            f"{second}. Look at `rollplex logs {service}` for why it ends, then submit again; "
            f"snapshot {self._run.snapshot} is as it was", reason="SERVICE_FAILED_TWICE", service=name, phase=phase.value,
            first=first.reason, second=second.reason)


async def _loss_of(group: EngineGroup | None, error: RollplexError) -> Loss | None:
    loss = LOSSES.get(error.reason)
    if loss is Loss.BROKER or group is None:
        return Loss.BROKER if loss is Loss.BROKER else None
    if loss is Loss.SILENCE and not await group.silent():
        return None
    return loss


def _lost_name(group: EngineGroup | None, error: RollplexError) -> str:
    return BROKER if group is None else error.metadata.get("service", group.name)
