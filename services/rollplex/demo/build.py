"""Builds everything a demo run needs: the question files with their videos, and the warm-started checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollplex.demo.checkpoint import VOCAB_SIZE, build_config, build_model, save_checkpoint
from rollplex.demo.prompts import corpus
from rollplex.demo.recipe import DemoRecipe
from rollplex.demo.tokenizer import build_tokenizer
from rollplex.demo.videos import make_videos
from rollplex.demo.warmstart import Progress, WarmStartOptions, warm_start


@dataclass(frozen=True)
class DemoBuild:
    """What was built, for the JSON line of `python -m rollplex.demo`. Losses in nats."""

    train: str
    heldout: str
    checkpoint: str
    seed: int
    blank_videos: bool
    train_rows: int
    heldout_rows: int
    video_bytes: int
    weight_bytes: int
    parameters: int
    sight_loss: float
    speech_loss: float
    videos_s: float
    warm_start_s: float

    def to_json(self) -> dict[str, object]:
        """The fields, ready for json.dumps."""
        return asdict(self)


def build_demo(
    directory: Path,
    *,
    seed: int,
    blank: bool = False,
    recipe: DemoRecipe | None = None,
    options: WarmStartOptions | None = None,
    progress: Progress = lambda part, done, total, loss: None,
) -> DemoBuild:
    """Write `directory`/train.json, heldout.json, videos/ and checkpoint/. `blank` leaves every clip empty (a control)."""
    recipe = recipe or DemoRecipe()
    started = time.monotonic()
    files = make_videos(
        directory, seed=seed, train_rows=recipe.train_rows, heldout_rows=recipe.heldout_rows, blank=blank
    )
    videos_s = time.monotonic() - started
    tokenizer = build_tokenizer(corpus(), VOCAB_SIZE)
    model = build_model(build_config(tokenizer), seed)
    taught = warm_start(model, tokenizer, seed=seed, blank=blank, options=options, progress=progress)
    checkpoint = directory / "checkpoint"
    weight_bytes = save_checkpoint(checkpoint, model, tokenizer)
    return DemoBuild(
        train=str(files.train),
        heldout=str(files.heldout),
        checkpoint=str(checkpoint),
        seed=seed,
        blank_videos=blank,
        train_rows=files.train_rows,
        heldout_rows=files.heldout_rows,
        video_bytes=files.video_bytes,
        weight_bytes=weight_bytes,
        parameters=model.num_parameters(),
        sight_loss=taught.sight_loss,
        speech_loss=taught.speech_loss,
        videos_s=videos_s,
        warm_start_s=taught.seconds,
    )
