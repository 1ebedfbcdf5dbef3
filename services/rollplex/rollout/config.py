"""The options of a rollout process, read from the mesh's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import load_sections
from rollplex.core.topology import Topology, device_name

ENGINES = ("torch",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """[rollout]."""

    engine: str = "torch"
    """What decodes: `torch`, on the CPU."""
    threads: int = 1
    """CPU threads of a forward pass. Another number may change a sample in its last bits."""
    max_rows: int = 256
    """Samples decoded at once; a group is never split, so a single larger group still runs. Ignored in deterministic
    mode, which decodes one group at a time."""
    tensor_parallel_size: int = 1
    """Ranks of a replica; the leader, `python -m rollplex.rollout`, spawns the others."""
    train_tensor_parallel_size: int = 1
    """The trainer's; with the one above it decides which devices a replica is on."""
    collective_timeout_s: float = 60.0
    """Deadline of every collective between a replica's ranks, and of every answer of a worker."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}; it must be one of {', '.join(ENGINES)}")
        for name in ("threads", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.collective_timeout_s > 0:
            raise ValueError(f"collective_timeout_s is {self.collective_timeout_s}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """[model], [mesh] and [rollout]; a file's other sections belong to other services."""

    model: ModelSection
    mesh: MeshSection
    rollout: RolloutSection = field(default_factory=RolloutSection)

    def __post_init__(self) -> None:
        self.topology  # noqa: B018 - refuses degrees that do not nest

    @property
    def topology(self) -> Topology:
        return Topology(self.rollout.train_tensor_parallel_size, self.rollout.tensor_parallel_size)

    def devices(self, replica: int) -> tuple[str, ...]:
        """Of the replica's ranks, by rank."""
        return tuple(map(device_name, self.topology.replica_devices(replica)))


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RolloutConfig:
    """Raises BadInput for a missing file, an unknown key and a wrong value, naming the key."""
    return RolloutConfig(**load_sections(path, list(overrides), {
        "model": ModelSection, "mesh": MeshSection, "rollout": RolloutSection}))
