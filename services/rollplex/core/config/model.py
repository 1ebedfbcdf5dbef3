"""[model]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollplex.core.config.checks import check_at_least, check_one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]: shared by all engines and the coordinator."""

    checkpoint: Path
    """Hugging Face directory of a Qwen2.5-VL model."""
    dtype: str = "float32"
    """Of the actor snapshot: `bfloat16`, `float32` or `float64` (tests)."""
    max_prompt_tokens: int = 16384
    """A longer prompt is refused, never truncated."""

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, ("bfloat16", "float32", "float64"))
        check_at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
