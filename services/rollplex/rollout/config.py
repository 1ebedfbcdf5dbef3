"""The options of a rollout process, read from the mesh's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import load_sections

ENGINES = ("torch", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSection:
    """[rollout.vllm]."""

    kv_cache_gib: float = 1.0
    """Keys and values a device, held while samples decode."""
    max_model_len: int = 0
    """Prompt and response together, at most; 0: what the checkpoint allows. One such sequence must fit kv_cache_gib."""
    max_num_batched_tokens: int = 8192
    """Tokens of one step, prompts' and samples' together; a longer prompt is computed in parts (on a CPU whole). More prefill
    faster, in more memory for activations."""
    gpu_memory_utilization: float = 0.05
    """Share of a GPU's memory that must be free when vLLM starts, a check of its own; kv_cache_gib sizes what it takes."""
    enforce_eager: bool = False
    """No CUDA graphs. On a CPU there are none."""
    sample_generators: bool = True
    """Every sample draws from a generator of its own seed. false: all from one, which is faster on a GPU: a launch a step for all
    samples, not for each; the same seeds then give other samples when others are decoded beside them. Deterministic runs
    have their generators whatever this says."""
    worker_process: bool = False
    """vLLM's worker is a process of its own with one rank too, as with several: one process schedules a step while the other
    launches one. Costs a process and its start, and at 3B on an H200 decoding was no faster; hbm_share_gib does not bound it."""
    custom_all_reduce: bool = True
    """Above one rank, vLLM's own all-reduce kernels where GPUs reach each other; otherwise, or without, NCCL's."""

    def __post_init__(self) -> None:
        if not self.kv_cache_gib > 0:
            raise ValueError(f"kv_cache_gib is {self.kv_cache_gib}; it must be above 0")
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least 1")
        if self.max_model_len < 0:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be 0 (the checkpoint's) or above")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """[rollout]."""

    engine: str = "torch"
    """What decodes: `torch`, our own decoder, or `vllm` (docs/vllm.md)."""
    threads: int = 1
    """CPU threads of a forward pass. Another number may change a sample in its last bits."""
    max_rows: int = 256
    """Samples decoded at once; a group is never split, so a single larger group still runs. Ignored in deterministic
    mode, which decodes one group at a time."""
    hbm_share_gib: float = 0.0
    """Of a GPU, what this process's allocator may take at most, keys and values included, slabs apart; 0: mesh.hbm_budget_gib."""
    vllm: VllmSection = field(default_factory=VllmSection)

    def __post_init__(self) -> None:
        if not self.hbm_share_gib >= 0:
            raise ValueError(f"hbm_share_gib is {self.hbm_share_gib}; it must be at least 0")
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}; it must be one of {', '.join(ENGINES)}")
        for name in ("threads", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """[model], [mesh] and [rollout]; a file's other sections belong to other services."""

    model: ModelSection
    mesh: MeshSection
    rollout: RolloutSection = field(default_factory=RolloutSection)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RolloutConfig:
    """Raises BadInput for a missing file, an unknown key and a wrong value, naming the key."""
    return RolloutConfig(**load_sections(path, list(overrides), {
        "model": ModelSection, "mesh": MeshSection, "rollout": RolloutSection}))
