"""Start + Watch: long commands in (epoch, sequence) order on one owner thread, with a log that outlives the watcher.

`update-protocol.md` has the rules: duplicates return the recorded outcome, gaps wait until their deadline, abort is out
of band, a new epoch ends what the old one left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rollplex.core.errors import Aborted, DeadlineExceeded, NotFound, RollplexError, WrongState, as_domain_error
from rollplex.core.work import FinishedSample

log = logging.getLogger(__name__)

KEPT_COMMANDS = 24
"""Ended commands whose outcome is remembered: more than an iteration has, few enough to keep memory flat."""


@dataclass(frozen=True, slots=True)
class Progress:
    done_count: int
    total_count: int
    unit: str


@dataclass(frozen=True, slots=True)
class Result:
    value: Any
    work_s: float


Event = Progress | tuple[FinishedSample, ...] | Result | RollplexError
Work = Callable[["Command"], Any]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Command:
    """One command and its log. Also the WorkContext that the engine sees, on the owner thread."""

    command_id: str
    epoch: int
    sequence: int
    deadline: float
    work: Work | None
    loop: asyncio.AbstractEventLoop
    timer: asyncio.TimerHandle | None = None
    """Fires at the deadline; cancelled at the end, or it would keep the command alive until then."""
    events: list[Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    aborting: bool = False
    ended: bool = False

    def record(self, event: Event) -> None:
        """On the loop only; nothing follows a result or a failure."""
        if self.ended:
            return
        self.events.append(event)
        self.ended = isinstance(event, Result | RollplexError)
        if self.ended and self.timer is not None:
            self.timer.cancel()
        self.changed.set()
        self.changed = asyncio.Event()

    def progress(self, done_count: int, total_count: int, unit: str) -> None:
        self.loop.call_soon_threadsafe(self.record, Progress(done_count, total_count, unit))

    def samples(self, samples: Sequence[FinishedSample]) -> None:
        if samples:
            self.loop.call_soon_threadsafe(self.record, tuple(samples))

    @property
    def aborted(self) -> bool:
        return self.aborting

    def check(self) -> None:
        if self.aborting:
            raise Aborted(f"command {self.command_id} was aborted", reason="COMMAND_ABORTED")
        if time.monotonic() > self.deadline:
            raise DeadlineExceeded(f"command {self.command_id} ran into its deadline", reason="COMMAND_TIMEOUT")


class CommandBoard:
    """The commands of one engine process. All methods run on the event loop."""

    def __init__(self, owner_thread: ThreadPoolExecutor, on_failure: Callable[[RollplexError], None] = lambda error: None
                 ) -> None:
        """`on_failure`: told on the owner thread of every command that failed, after those who watch it."""
        self._owner, self.on_failure = owner_thread, on_failure
        self._commands: OrderedDict[str, Command] = OrderedDict()
        self._waiting: dict[int, Command] = {}
        self.epoch = 0
        self.next_sequence = 1

    def join(self, epoch: int) -> None:
        """Enters an epoch; a new one starts at sequence 1 and aborts what the old one left."""
        if epoch < self.epoch:
            raise WrongState(f"epoch {epoch} is over; the group is in epoch {self.epoch}", reason="STALE_EPOCH",
                             epoch=self.epoch)
        if epoch == self.epoch:
            return
        for command in self._commands.values():
            if command.ended:
                continue
            command.aborting = True
            if self._waiting.pop(command.sequence, None) is command:
                command.work = None
                command.record(Aborted(f"epoch {command.epoch} ended before the command's turn",
                                       reason="COMMAND_ABORTED"))
        self._waiting.clear()
        self.epoch, self.next_sequence = epoch, 1

    def start(self, command_id: str, epoch: int, sequence: int, timeout_s: float, work: Work) -> bool:
        """Enqueues a command; True when it had been started before. Raises WrongState for a stale place in the order."""
        if command_id in self._commands:
            return True
        if epoch != self.epoch:
            raise WrongState(f"the command is of epoch {epoch}; the engine is in {self.epoch}", reason="STALE_EPOCH",
                             epoch=self.epoch)
        if sequence < self.next_sequence or sequence in self._waiting:
            raise WrongState(f"sequence {sequence} is taken; the engine expects {self.next_sequence}",
                             reason="STALE_SEQUENCE", next_sequence=self.next_sequence)
        loop = asyncio.get_running_loop()
        command = Command(command_id, epoch, sequence, time.monotonic() + timeout_s, work, loop)
        self._commands[command_id] = command
        self._waiting[sequence] = command
        command.timer = loop.call_later(timeout_s, self._expire, command)
        self._pump()
        self._forget_old()
        return False

    async def watch(self, command_id: str, after_cursor: int) -> AsyncIterator[tuple[int, Event]]:
        """Events after a cursor, the recorded ones first, until the command has ended."""
        command = self._find(command_id)
        cursor = after_cursor
        while True:
            changed = command.changed
            while cursor < len(command.events):
                cursor += 1
                yield cursor, command.events[cursor - 1]
            if command.ended:
                return
            await changed.wait()

    def abort(self, command_id: str) -> bool:
        """Asks the command to end; False when it had ended."""
        command = self._find(command_id)
        if command.ended:
            return False
        command.aborting = True
        return True

    def abort_all(self) -> None:
        for command in self._commands.values():
            command.aborting = True

    def _find(self, command_id: str) -> Command:
        command = self._commands.get(command_id)
        if command is None:
            raise NotFound(f"no command {command_id}; the engine may have been restarted", reason="COMMAND_NOT_FOUND")
        return command

    def _pump(self) -> None:
        while (command := self._waiting.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            self._owner.submit(self._execute, command)

    def _execute(self, command: Command) -> None:
        """On the owner thread."""
        started = time.monotonic()
        try:
            command.check()
            work, command.work = command.work, None  # the request goes with the closure; only the outcome is kept
            event: Event = Result(work(command), time.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - recorded, and raised again at the watcher
            event = as_domain_error(error)
            log.warning("command %s failed: %s: %s", command.command_id, event.reason, event,
                        exc_info=event.reason == "INTERNAL")
            # The outcome is kept for a while; the frames of its traceback hold graphs and pixels.
            event.__cause__ = event.__context__ = None
            event = event.with_traceback(None)
        command.loop.call_soon_threadsafe(command.record, event)
        if isinstance(event, RollplexError):
            self.on_failure(event)

    def _expire(self, command: Command) -> None:
        if command.ended:
            return
        command.aborting = True
        if self._waiting.get(command.sequence) is command:
            del self._waiting[command.sequence]
            command.work = None
        command.record(DeadlineExceeded(f"command {command.command_id} (sequence {command.sequence}) did not end in "
                                        f"time; the engine is at sequence {self.next_sequence}",
                                        reason="COMMAND_TIMEOUT", sequence=command.sequence))

    def _forget_old(self) -> None:
        ended = [name for name, command in self._commands.items() if command.ended]
        for name in ended[:max(0, len(ended) - KEPT_COMMANDS)]:
            del self._commands[name]
