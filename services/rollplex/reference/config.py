"""The options of a reference process, read from the mesh's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import load_sections

WEIGHTS = ("paged", "resident")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection:
    """[reference]."""

    threads: int = 1
    """CPU threads of a forward pass. Another number may change a score in its last bits."""
    suffix_tokens: int = 4096
    """Response tokens in one forward, of a group or of groups that go together (run.suffix_micro_batch_samples); whole samples,
    so a single longer one still runs."""
    weights: str = "paged"
    """`paged`: in host memory, on a GPU only while it computes with them; `resident`: on the device all the time."""
    hbm_share_gib: float = 0.0
    """Of a GPU, what this process's allocator may take at most, pages of weights apart; 0: mesh.hbm_budget_gib."""

    def __post_init__(self) -> None:
        for name in ("threads", "suffix_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}; it must be one of {', '.join(WEIGHTS)}")
        if not self.hbm_share_gib >= 0:
            raise ValueError(f"hbm_share_gib is {self.hbm_share_gib}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """[model], [mesh] and [reference]; a file's other sections belong to other services."""

    model: ModelSection
    mesh: MeshSection
    reference: ReferenceSection = field(default_factory=ReferenceSection)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ReferenceConfig:
    """Raises BadInput for a missing file, an unknown key and a wrong value, naming the key."""
    return ReferenceConfig(**load_sections(path, list(overrides), {
        "model": ModelSection, "mesh": MeshSection, "reference": ReferenceSection}))
