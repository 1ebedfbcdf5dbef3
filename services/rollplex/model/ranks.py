"""A role's ranks: tensor-parallel groups, each with the whole model, that share out an iteration's prompts (data parallelism).

Rank r has shard r // q of the model in replica r % q, with q replicas: ranks that hold one rollout shard (core.topology) are each
of another replica, so that a replica's ranks find the whole model in the slabs of their own devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from rollplex.core.errors import BadInput
from rollplex.core.work import PreparedGroup, ResponseGroup
from rollplex.model.parallel import Group, Seat, group_error, sub_group, tensor_parallel_group

Prompt = TypeVar("Prompt", PreparedGroup, ResponseGroup)


@dataclass
class Ranks:
    """One rank's place; the process groups are those of the epoch that `meet` was last called in."""

    rank: int
    size: int
    tensor_size: int
    """Ranks that compute a group together; it divides `size`."""

    def __post_init__(self) -> None:
        if self.tensor_size < 1 or self.size % self.tensor_size:
            raise BadInput(f"{self.size} ranks in tensor-parallel groups of {self.tensor_size}: it must divide them",
                           reason="BAD_TOPOLOGY", ranks=self.size, tensor_parallel_size=self.tensor_size)
        self.tensor: Group = Seat(self.tensor_rank, self.tensor_size)
        """This replica's ranks."""
        self.data: Group = Seat(self.replica, self.replicas)
        """The ranks of this shard."""

    @property
    def replicas(self) -> int:
        return self.size // self.tensor_size

    @property
    def replica(self) -> int:
        return self.rank % self.replicas

    @property
    def tensor_rank(self) -> int:
        return self.rank // self.replicas

    @property
    def world(self) -> dist.ProcessGroup:
        return tensor_parallel_group()

    def replica_of(self, group: Prompt) -> int:
        """Which one computes it: the same in every command, whatever it is given with. Neighbours go to different ones."""
        return group.group_index % self.replicas

    def own(self, groups: Iterable[Prompt]) -> list[Prompt]:
        """Those that this replica computes."""
        return [group for group in groups if self.replica_of(group) == self.replica]

    def meet(self, timeout_s: float, device: torch.device | str) -> None:
        """Makes the groups, after `init_tensor_parallel` of all ranks, which call this together."""
        timeout = timedelta(seconds=timeout_s)
        if self.replicas == 1:
            self.tensor = self.world
        elif self.tensor_size == 1:
            self.data = self.world
        else:
            shards, replicas = range(self.tensor_size), range(self.replicas)
            # Every rank makes every group: so torch.distributed wants it.
            tensor = [sub_group([shard * self.replicas + replica for shard in shards], timeout, device) for replica in replicas]
            data = [sub_group([shard * self.replicas + replica for replica in replicas], timeout, device) for shard in shards]
            self.tensor, self.data = tensor[self.replica], data[self.tensor_rank]

    def abort(self) -> None:
        """Any thread, over NCCL: what waits in a collective returns."""
        for group in self._groups():
            group.abort()

    def error(self) -> str:
        """`group_error` of the first group that is broken."""
        return next(filter(None, map(group_error, self._groups())), "")

    def _groups(self) -> list[dist.ProcessGroup]:
        """Each once; none before `init_tensor_parallel`."""
        if not dist.is_initialized():
            return []
        return list({id(group): group for group in (self.tensor, self.data, self.world) if not isinstance(group, Seat)}.values())
