"""The options of a trainer process, read from the mesh's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import load_sections
from rollplex.core.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """[trainer]."""

    threads: int = 1
    """CPU threads of a forward or backward pass. Another number may change a gradient in its last bits."""
    tensor_parallel_size: int = 1
    """Ranks, one process each; rank g runs on device g."""
    rollout_tensor_parallel_size: int = 1
    """TP_rollout; tensor_parallel_size is a multiple of it."""
    rendezvous: str = ""
    """Directory (file:///path) where the ranks of an epoch meet; empty: `rendezvous` in the mesh's runtime directory."""
    collective_timeout_s: float = 600.0
    """Deadline of every collective between ranks, and of their meeting."""
    check_hashes: bool = False
    """After every publish, compare by hash what several devices hold, and before it, gradients that ranks share. Debugging."""
    logprob_chunk_tokens: int = 1024
    """Response tokens whose logits exist at once."""
    offload_pool_bytes: int = 1 << 30
    """Host slab for activations when the run's saved_activations is `offload`."""

    def __post_init__(self) -> None:
        for name in ("threads", "logprob_chunk_tokens", "offload_pool_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.collective_timeout_s > 0:
            raise ValueError(f"collective_timeout_s is {self.collective_timeout_s}; it must be above 0")
        if self.rendezvous and not self.rendezvous.startswith("file:///"):
            raise ValueError(f"rendezvous is {self.rendezvous!r}; it must be file:///path of a directory")
        Topology(self.tensor_parallel_size, self.rollout_tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """[model], [mesh] and [trainer]; a file's other sections belong to other services."""

    model: ModelSection
    mesh: MeshSection
    trainer: TrainerSection = field(default_factory=TrainerSection)

    @property
    def rendezvous(self) -> Path:
        given = self.trainer.rendezvous
        return Path(given.removeprefix("file://")) if given else self.mesh.runtime_dir / "rendezvous"


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Raises BadInput for a missing file, an unknown key and a wrong value, naming the key."""
    return TrainerConfig(**load_sections(path, list(overrides), {
        "model": ModelSection, "mesh": MeshSection, "trainer": TrainerSection}))
