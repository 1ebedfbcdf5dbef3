"""The options of a trainer process, read from the mesh's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import load_sections

GRADIENT_PLACES = ("hbm", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """[trainer]."""

    threads: int = 1
    """CPU threads of a forward or backward pass. Another number may change a gradient in its last bits."""
    check_hashes: bool = False
    """After every publish, compare by hash what several devices hold, and before it, gradients that ranks share. Debugging."""
    logprob_chunk_tokens: int = 1024
    """Response tokens whose logits exist at once."""
    offload_pool_bytes: int = 1 << 30
    """Host slab for activations when the run's saved_activations is `offload`."""

    gradients: str = ""
    """Where the FP32 gradient buffer lies: `hbm`, on the rank's device, from the first suffix to the end of the update; `host`,
    in host memory for the whole run (on a GPU every backward pass then moves 8 bytes a parameter over the bus). Empty: `hbm` on
    GPUs, else `host`."""

    hbm_share_gib: float = 0.0
    """Of a GPU, what this process's allocator may take at most, slabs apart; 0: mesh.hbm_budget_gib."""

    def __post_init__(self) -> None:
        if not self.hbm_share_gib >= 0:
            raise ValueError(f"hbm_share_gib is {self.hbm_share_gib}; it must be at least 0")
        if self.gradients not in ("", *GRADIENT_PLACES):
            raise ValueError(f"gradients is {self.gradients!r}; it must be one of {', '.join(GRADIENT_PLACES)}, or empty")
        for name in ("threads", "logprob_chunk_tokens", "offload_pool_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def gradient_place(self, device_kind: str) -> str:
        """`hbm` or `host`, for devices of MeshSection.devices."""
        return self.gradients or ("hbm" if device_kind == "cuda" else "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """[model], [mesh] and [trainer]; a file's other sections belong to other services."""

    model: ModelSection
    mesh: MeshSection
    trainer: TrainerSection = field(default_factory=TrainerSection)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Raises BadInput for a missing file, an unknown key and a wrong value, naming the key."""
    return TrainerConfig(**load_sections(path, list(overrides), {
        "model": ModelSection, "mesh": MeshSection, "trainer": TrainerSection}))
