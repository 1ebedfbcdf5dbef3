"""Ranks as replicas of the whole model, which may share an iteration's groups out (data parallelism). Pure arithmetic.

With q replicas rank r has shard r // q of the model in replica r % q. So training's ranks lie over rollout's replicas
(topology.py), and so they share groups out: a replica's ranks find the whole model in the slabs of their own devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Replicas:
    """Raises BadInput unless `tensor_size` divides `ranks`."""

    ranks: int
    tensor_size: int
    """Ranks that compute a group together: those of a replica."""

    def __post_init__(self) -> None:
        if self.tensor_size < 1 or self.ranks < 1 or self.ranks % self.tensor_size:
            raise BadInput(f"{self.ranks} ranks in tensor-parallel groups of {self.tensor_size}: it must divide them",
                           reason="BAD_TOPOLOGY", ranks=self.ranks, tensor_parallel_size=self.tensor_size)

    @property
    def count(self) -> int:
        return self.ranks // self.tensor_size

    def of_rank(self, rank: int) -> int:
        return rank % self.count

    def shard(self, rank: int) -> int:
        """The rank's number in its replica."""
        return rank // self.count

    def members(self, replica: int) -> list[int]:
        """Ranks, by shard."""
        return [shard * self.count + replica for shard in range(self.tensor_size)]

    def peers(self, shard: int) -> list[int]:
        """Ranks that hold the shard, by replica."""
        return [shard * self.count + replica for replica in range(self.count)]

    def of_group(self, group_index: int) -> int:
        """Which replica computes a group: the same one in every command, whatever it is given with. Neighbours go to different
        ones."""
        return group_index % self.count
