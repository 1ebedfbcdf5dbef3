"""One rank of a role among its replicas, and the process groups between them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from rollplex.core.replicas import Replicas
from rollplex.core.work import PreparedGroup, ResponseGroup
from rollplex.model.parallel import Group, Seat, destroy_tensor_parallel, group_error, sub_group, tensor_parallel_group

Prompt = TypeVar("Prompt", PreparedGroup, ResponseGroup)
log = logging.getLogger(__name__)


class Ranks:
    """`meet` and `leave` are the pair, once an epoch; in between the groups are seats."""

    def __init__(self, rank: int, size: int, tensor_size: int) -> None:
        """Raises BadInput unless `tensor_size`, the ranks that compute a group together, divides `size`."""
        self._places = places = Replicas(size, tensor_size)
        self.rank, self.size, self.tensor_size = rank, size, tensor_size
        self.replicas, self.replica, self.tensor_rank = places.count, places.of_rank(rank), places.shard(rank)
        self.tensor: Group
        """This replica's ranks."""
        self.data: Group
        """The ranks of this shard."""
        self._take_seats()

    @property
    def world(self) -> dist.ProcessGroup:
        return tensor_parallel_group()

    def own(self, groups: Iterable[Prompt]) -> list[Prompt]:
        """Those that this replica computes."""
        return [group for group in groups if self._places.of_group(group.group_index) == self.replica]

    def own_packs(self, packs: Iterable[Sequence[Prompt]]) -> Iterator[list[Prompt]]:
        """This replica's part of each, where it has one. Packs are all ranks': which groups meet in one does not depend on the
        message that they came with."""
        return filter(None, map(self.own, packs))

    def meet(self, timeout_s: float, device: torch.device | str) -> None:
        """After `init_tensor_parallel` of all ranks, which call this together."""
        timeout = timedelta(seconds=timeout_s)
        if self.replicas == 1:
            self.tensor = self.world
        elif self.tensor_size == 1:
            self.data = self.world
        else:
            # Every rank makes every group: so torch.distributed wants it.
            tensor = [sub_group(self._places.members(replica), timeout, device) for replica in range(self.replicas)]
            data = [sub_group(self._places.peers(shard), timeout, device) for shard in range(self.tensor_size)]
            self.tensor, self.data = tensor[self.replica], data[self.tensor_rank]

    def leave(self) -> None:
        """Ends every group, the default one too. Idempotent."""
        groups = self._groups()
        if len(groups) > 1 and dist.get_backend() == "nccl":
            self.abort()
        self._take_seats()
        destroy_tensor_parallel()

    def abort(self) -> None:
        """Any thread, over NCCL: what waits in a collective of any group returns. All at once: an abort frees memory and so waits
        for the GPU, also for a kernel that spins in another group."""
        threads = [Thread(target=_abort, args=(group,), name="abort", daemon=True) for group in self._groups()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def error(self) -> str:
        """`group_error` of the first group that is broken."""
        return next(filter(None, map(group_error, self._groups())), "")

    def _take_seats(self) -> None:
        self.tensor, self.data = Seat(self.tensor_rank, self.tensor_size), Seat(self.replica, self.replicas)

    def _groups(self) -> list[dist.ProcessGroup]:
        """Each once; none before `init_tensor_parallel`."""
        if not dist.is_initialized():
            return []
        return list({id(group): group for group in (self.tensor, self.data, self.world) if not isinstance(group, Seat)}.values())


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        # torch's, after a wait of the group's timeout; its watchdog is what is left to end the group.
        log.warning("a group could not be aborted: %s", error)
