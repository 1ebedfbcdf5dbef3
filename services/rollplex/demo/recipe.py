"""The numbers of the demo: what `rollplex demo` turns into a run's config. Measured in README.md; change them together."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.demo.clips import FPS, FRAME_PX, FRAMES
from rollplex.demo.prompts import QUESTION_TEMPLATE, TYPE_TEMPLATES


@dataclass(frozen=True)
class DemoRecipe:
    """One demo. Rows are read in file order, never shuffled, a multiple of 16 an iteration: `make_videos` says why."""

    iterations: int = 30
    groups_per_iteration: int = 16
    samples_per_group: int = 8
    learning_rate: float = 1.5e-4
    """AdamW, betas 0.9 and 0.999, no weight decay, gradient clipped at 1.0, one update an iteration."""
    vision_learning_rate: float = 0.0
    """Tower and projector are frozen: they see well already, and reinforcement on noise (control `shuffle`) would wreck them."""
    kl_coef: float = 0.05
    """Weight of k3 to the warm start. Keeps the format when rewards say nothing, and gives the reference service its work."""
    aggregation: str = "seq-mean-token-mean"
    advantage: str = "grpo"
    temperature: float = 1.0
    max_response_tokens: int = 16
    """A response in the format has 11 tokens, the end token included."""
    train_rows: int = 240
    heldout_rows: int = 64
    format_weight: float = 1.0
    """Reward = accuracy + format_weight * format, as in Video-R1. What the demo reports is the accuracy alone."""
    question_template: str = QUESTION_TEMPLATE
    fps: float = float(FPS)
    frames: int = FRAMES
    video_pixels: int = FRAME_PX * FRAME_PX
    """Smallest and largest pixels of a frame: none is resized."""

    @property
    def type_templates(self) -> dict[str, str]:
        """Sentence added to the question, by problem type."""
        return dict(TYPE_TEMPLATES)
