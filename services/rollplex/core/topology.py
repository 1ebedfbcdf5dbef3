"""Which device holds what when training and rollout have different tensor-parallel degrees. Pure arithmetic.

Device g runs training rank g and holds rollout shard g // q, with q = TP_train / TP_rollout. The q devices of one rollout
shard belong to the q rollout replicas: with TP_train = 8 and TP_rollout = 4, replica 0 sits on devices 0, 2, 4, 6 and replica 1
on devices 1, 3, 5, 7 (training.md, section 4).

With `own_replicas` rollout sits on devices of its own, numbered after the trainer's, and shares none: its slabs are copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.core.errors import BadInput
from rollplex.core.replicas import Replicas
from rollplex.core.visible_gpus import visible_ordinal

DEVICE_KINDS = ("host", "cuda")


@dataclass(frozen=True, slots=True)
class Topology:
    """One node group. Raises BadInput unless q is a positive integer."""

    train_tp: int = 1
    rollout_tp: int = 1
    own_replicas: int = 0
    """Rollout replicas on devices of their own; 0: they share the trainer's."""
    device_kind: str = "host"
    """`host`: a device is a slab set in host memory, computed on by the CPU; `cuda`: a GPU."""

    def __post_init__(self) -> None:
        if self.train_tp < 1 or self.rollout_tp < 1 or self.train_tp % self.rollout_tp:
            raise BadInput(f"training at TP {self.train_tp} and rollout at TP {self.rollout_tp}: TP_train must be a positive "
                           "multiple of TP_rollout, so that training shards nest in rollout shards", reason="BAD_TOPOLOGY",
                           train_tp=self.train_tp, rollout_tp=self.rollout_tp)
        if self.own_replicas < 0:
            raise BadInput(f"{self.own_replicas} rollout replicas on devices of their own; it must be at least 0",
                           reason="BAD_TOPOLOGY")
        if self.device_kind not in DEVICE_KINDS:
            raise BadInput(f"devices of kind {self.device_kind!r}; it must be one of {', '.join(DEVICE_KINDS)}",
                           reason="BAD_TOPOLOGY")

    @property
    def _places(self) -> Replicas:
        return Replicas(self.train_tp, self.rollout_tp)

    @property
    def q(self) -> int:
        return self._places.count

    @property
    def device_count(self) -> int:
        return self.train_tp + self.own_replicas * self.rollout_tp

    @property
    def replica_count(self) -> int:
        return self.own_replicas or self.q

    def rollout_shard(self, device: int) -> int:
        """Which of the TP_rollout shards a trainer's device holds."""
        return self._places.shard(device)

    def part(self, device: int) -> int:
        """Which of the q parts of that shard the device's training rank owns."""
        return self._places.of_rank(device)

    def peers(self, device: int) -> tuple[int, ...]:
        """Devices that hold the same rollout shard, the device itself included: where its training rank writes."""
        return tuple(self._places.peers(self.rollout_shard(device)))

    def replica_devices(self, replica: int) -> tuple[int, ...]:
        """Device of each rollout rank of a replica."""
        if not 0 <= replica < self.replica_count:
            raise BadInput(f"replica {replica} of {self.replica_count}", reason="BAD_TOPOLOGY")
        if self.own_replicas:
            first = self.train_tp + replica * self.rollout_tp
            return tuple(range(first, first + self.rollout_tp))
        return tuple(self._places.members(replica))

    def source(self, replica: int) -> tuple[int, ...]:
        """Trainer's devices with the shards of a replica's devices: those themselves, or what a replica with devices of its
        own copies from. The q holders of a shard are taken in turn."""
        return tuple(self._places.members(replica % self.q))

    def device_name(self, index: int) -> str:
        """"host:0", "cuda:1", ...: a slab set, and what computes on it."""
        return f"{self.device_kind}:{index}"


def is_host(device: str) -> bool:
    """Whether the host driver serves it: plain host memory, or a host device."""
    return device == "host" or device.startswith("host:") and device[5:].isdecimal()


def is_cuda(device: str) -> bool:
    return device.startswith("cuda:") and device[5:].isdecimal()


def torch_device(device: str) -> str:
    """Where tensors over a device's slabs lie, as torch names it in this process: a GPU by its number among those that the
    process sees. Raises BadInput (GPU_NOT_VISIBLE) for one that it does not."""
    return f"cuda:{visible_ordinal(int(device.removeprefix('cuda:')))}" if is_cuda(device) else "cpu"
