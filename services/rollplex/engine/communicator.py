"""A role's communicator: made for one epoch, broken by the first failure, made again for the next.

A rank that dies, fails or falls behind ends the command of every other one with an error that names it and the phase: a dead
process closes its sockets, a failing one leaves the group, and every collective has a deadline. On a GPU, where nobody hears a
socket close, `PeerWatch` sees both.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollplex.core.errors import Aborted, DeadlineExceeded, RollplexError, Unavailable, as_domain_error
from rollplex.core.phases import Phase
from rollplex.engine.meeting import Meeting, meet
from rollplex.engine.peer_watch import PeerWatch
from rollplex.model import Ranks, init_tensor_parallel
from rollplex.model.parallel import Group

log = logging.getLogger(__name__)

CLOSING = -1
"""Announced in place of an epoch when the process ends."""
_DEATH_WAIT_S = 2.0
"""Sockets of a killed process close a moment before its end can be seen."""


class Communicator:
    """Owner thread only, but for `announce`. At size 1 there is nothing to do, and every method does it."""

    def __init__(self, role: str, rank: int, size: int, rendezvous: Path, *, timeout_s: float, device: str = "cpu",
                 tensor_size: int = 0) -> None:
        """`rendezvous`: directory that the ranks share. `timeout_s`: of a meeting, and of each collective. `device`: where the
        tensors of collectives lie, as torch names it. `tensor_size`: Ranks.tensor_size; 0: all ranks."""
        self.role, self.rank, self.size = role, rank, size
        self.ranks = Ranks(rank, size, tensor_size or size)
        self.use_group: Callable[[Group], None] = lambda group: None
        """Called with the tensor-parallel group of every new epoch."""
        self._folder, self._timeout_s, self._device = rendezvous / role, timeout_s, device
        self._announced, self._entered, self._commands = 0, 0, 0
        self._meeting: Meeting | None = None
        self._pidfds: dict[int, int] = {}
        """Of the other ranks' processes, by rank."""
        self._watch: PeerWatch | None = None
        self._unusable: RollplexError | None = Unavailable(f"{role} rank {rank} has not joined an epoch",
                                                           reason="NO_COMMUNICATOR")

    def announce(self, epoch: int) -> None:
        """Any thread: an epoch that is still being waited for, and is not this one, is given up."""
        self._announced = epoch

    def enter(self, epoch: int) -> None:
        """Meets the other ranks under `epoch`. A failure is kept for the commands that need the group."""
        if self.size == 1 or epoch in (self._entered, CLOSING) or epoch != self._announced:
            return
        self._leave(Unavailable(f"{self.role} rank {self.rank} is joining epoch {epoch}", reason="NO_COMMUNICATOR"))
        try:
            self._meeting = meet(self._folder, epoch, self.rank, self.size, timeout_s=self._timeout_s,
                                 go_on=lambda: self._still_wanted(epoch))
            self._pidfds = {found.rank: os.pidfd_open(found.pid) for found in self._meeting.attendances
                            if found.rank != self.rank}
            init_tensor_parallel(self.rank, self.size, timeout_s=self._timeout_s, device=self._device, asks_errors=True,
                                 store=dist.FileStore(str(self._meeting.folder / "store"), self.size))
            self.ranks.meet(self._timeout_s, self._device)
            self._watch_peers(self._meeting)
        except Exception as error:  # noqa: BLE001 - nobody waits for this call; the first command that needs the group says why
            what = str(error) if isinstance(error, RollplexError) else f"{type(error).__name__}: {error}"
            self._leave(Unavailable(f"{self.role} rank {self.rank} could not join epoch {epoch}: {what}",
                                    reason="NO_COMMUNICATOR", epoch=epoch))
            log.warning("%s", self._unusable)
            return
        self.use_group(self.ranks.tensor)
        self._entered, self._commands, self._unusable = epoch, 0, None

    @contextmanager
    def together(self, phase: Phase, command: str) -> Iterator[None]:
        """Around a command that all ranks execute and that has collectives. Whatever it raises ends the communicator, so that
        the other ranks do not wait: the group rejoins under the next epoch.

        Raises Unavailable before it when there is no communicator; Aborted (PEER_LOST, PEER_FAILED) or DeadlineExceeded
        (COLLECTIVE_TIMEOUT) for another rank's failure, with `rank` and `phase`.
        """
        if self.size == 1:
            yield
            return
        if self._unusable is not None:
            raise self._unusable
        self._commands += 1
        where = f"{phase.value.upper()} ({command})"
        assert self._meeting is not None
        self._meeting.note("at", self.rank, f"{self._commands} {where}")
        try:
            yield
            self._raise_if_broken()
        except Exception as error:
            failure = self._blamed(error, phase, where) if is_collective(error) else as_domain_error(error)
            self.fail(failure, where)
            if failure is error:
                raise
            raise failure from error

    def fail(self, error: RollplexError, where: str) -> None:
        """This rank cannot go on: says why, and leaves, so that the others do not wait for it. Idempotent."""
        if self.size == 1 or self._unusable is not None:
            return
        if self._meeting is not None:
            self._meeting.note("left", self.rank, f"{error.reason}: {error}")
        self._leave(Unavailable(f"the communicator of {self.role} broke in {where}: {error}; join a new epoch",
                                reason="NO_COMMUNICATOR"))

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: what JSON holds, and nothing that could run on the other side. Inside `together`."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=self._device))
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        padded[:mine.numel()] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(part[:count].cpu().numpy().tobytes()) for part, count in zip(parts, counts)]

    def close(self) -> None:
        self._announced = CLOSING
        if self.size > 1:
            self._leave(Unavailable(f"{self.role} rank {self.rank} is ending", reason="NO_COMMUNICATOR"))

    def _watch_peers(self, meeting: Meeting) -> None:
        if torch.device(self._device).type == "cuda":
            self._watch = PeerWatch(self._pidfds, lambda rank: meeting.read("left", rank), self.ranks.abort)

    def _still_wanted(self, epoch: int) -> None:
        if self._announced != epoch:
            raise Aborted(f"epoch {self._announced} was announced meanwhile", reason="STALE_EPOCH")

    def _raise_if_broken(self) -> None:
        """Collectives that were aborted leave garbage behind and no error."""
        lost = self._watch is not None and self._watch.lost
        if what := "a rank was lost" if lost else self.ranks.error():
            raise dist.DistError(f"collectives were aborted: {what}")

    def _leave(self, why: RollplexError) -> None:
        self._unusable = why
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self.ranks.leave()
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
        self._meeting = None

    def _blamed(self, error: Exception, phase: Phase, where: str) -> RollplexError:
        """A failed collective as an error that names whose fault it is."""
        lost, left = self._missing_peers()
        about = {"role": self.role, "phase": phase.value}
        if lost:
            return Aborted(f"{self.role} rank {lost[0]} died in {where}; seen by rank {self.rank}", reason="PEER_LOST",
                           rank=lost[0], **about)
        if left:
            rank, why = next(iter(left.items()))
            return Aborted(f"{self.role} rank {rank} left in {where}: {why}; seen by rank {self.rank}", reason="PEER_FAILED",
                           rank=rank, **about)
        behind = self._behind()
        names = "; ".join(f"rank {rank} is at {at}" for rank, at in behind.items()) or "every rank is in it"
        return DeadlineExceeded(
            f"a collective of {self.role} in {where} did not end within {self._timeout_s:g} s at rank {self.rank}: {names} "
            f"({error})", reason="COLLECTIVE_TIMEOUT", rank=",".join(map(str, behind)) or "unknown", **about)

    def _missing_peers(self) -> tuple[list[int], dict[int, str]]:
        """Dead ranks, and what ranks said that left; waits a moment for either to show."""
        assert self._meeting is not None
        poll = select.poll()
        ranks = {pidfd: rank for rank, pidfd in self._pidfds.items()}
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        deadline = time.monotonic() + _DEATH_WAIT_S
        while True:
            lost = sorted(ranks[pidfd] for pidfd, _ in poll.poll(50))
            left = {rank: why for rank in self._pidfds if (why := self._meeting.read("left", rank))}
            if lost or left or time.monotonic() > deadline:
                return lost, left

    def _behind(self) -> dict[int, str]:
        """Ranks that are not in this rank's command, and where they are."""
        assert self._meeting is not None
        mine = self._meeting.read("at", self.rank)
        found = {rank: self._meeting.read("at", rank) for rank in range(self.size)}
        return {rank: at.partition(" ")[2] or "its first command" for rank, at in found.items() if at != mine}


def is_collective(error: Exception) -> bool:
    """Whether torch.distributed raised it; gloo's errors are plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "pair closure" in text))
