"""The demo's data, model and configuration, as its recipe says."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex.core.errors import InternalError
from rollplex.core.strict import apply_overrides, read_toml
from rollplex_client.cli.mesh import last_lines
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import Settings, merge, parse_settings
from rollplex_client.cli.shuffled_reward import READY
from rollplex_client.prompts import Prompt, prompt_from_row
from rollplex_client.sync import Client

if TYPE_CHECKING:
    from rollplex.demo.recipe import DemoRecipe

RUNTIME_DIR = "mesh"
WARM_LIBRARIES = "import torch, transformers, megatron.core, av"


@dataclass(frozen=True, slots=True)
class DemoData:
    """What `python -m rollplex.demo` built."""

    train: Path
    heldout: Path
    checkpoint: Path
    facts: dict[str, Any]
    """Its whole answer: sizes, losses and seconds."""


def build(arguments: argparse.Namespace, output: Output) -> DemoData:
    """Renders videos and warm-starts the model in a process of its own. Raises InternalError with its last words."""
    folder = arguments.out / "data"
    command = [sys.executable, "-m", "rollplex.demo", "--out", str(folder), "--seed", str(arguments.seed)]
    command += ["--blank-videos"] if arguments.control == "blank-videos" else []
    command += ["--json"] if output.json else []
    log = arguments.out / "build.log"
    # The services import the same libraries right after this; the second core reads them from disk meanwhile.
    with _background([sys.executable, "-c", WARM_LIBRARIES]), log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors if output.json else None, text=True,
                              check=False)
    if done.returncode:
        raise InternalError(f"rollplex.demo ended with status {done.returncode}; " + "; ".join(last_lines(log, 3)),
                            reason="DEMO_BUILD_FAILED")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    return DemoData(Path(facts["train"]), Path(facts["heldout"]), Path(facts["checkpoint"]), facts)


@contextlib.contextmanager
def _background(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def settings_for(arguments: argparse.Namespace, recipe: DemoRecipe, data: DemoData) -> Settings:
    """The recipe, then --config, then --set. A rollplex.toml that happens to lie about is not read."""
    folder = data.train.parent.absolute()
    tables: dict[str, Any] = {
        "mesh": {"runtime_dir": str(arguments.runtime_dir or arguments.out / RUNTIME_DIR)},
        "model": {"checkpoint": str(data.checkpoint.absolute()), "max_prompt_tokens": 1024},
        "coordinator": {"media_roots": [str(folder)], "media": {
            "fps": recipe.fps, "min_frames": recipe.frames, "max_frames": recipe.frames,
            "video_min_pixels": recipe.video_pixels, "video_max_pixels": recipe.video_pixels}},
        "reward": {"format_weight": recipe.format_weight},
        "run": {
            "seed": arguments.seed, "schedule": arguments.schedule,
            "sampling": {"samples_per_group": recipe.samples_per_group, "temperature": recipe.temperature,
                         "max_response_tokens": recipe.max_response_tokens},
            "loss": {"kl_coef": recipe.kl_coef, "aggregation": recipe.aggregation, "advantage": recipe.advantage},
            "optimizer": {"learning_rate": recipe.learning_rate, "vision_learning_rate": recipe.vision_learning_rate,
                          "projector_learning_rate": recipe.vision_learning_rate}},
    }
    given = read_toml(arguments.config) if arguments.config else {}
    return parse_settings(apply_overrides(merge(tables, given), arguments.overrides))


def prompts(recipe: DemoRecipe, path: Path) -> list[Prompt]:
    from rollplex.data.datasets import read_dataset

    return [prompt_from_row(row) for row in read_dataset(
        path, question_template=recipe.question_template, type_templates=recipe.type_templates)]


@contextlib.contextmanager
def control(name: str | None, settings: Settings, client: Client, seed: int) -> Iterator[None]:
    """For `shuffle-rewards`: puts a shuffling service in the place of the built-in reward."""
    if name != "shuffle-rewards":
        yield
        return
    section = settings.sections["coordinator"]
    address = f"unix:{settings.mesh.runtime_dir / 'shuffled-reward.sock'}"
    true_address = settings.mesh.address("reward")
    log = settings.mesh.runtime_dir / "logs" / "shuffled-reward.log"
    command = [sys.executable, "-m", "rollplex_client.cli.shuffled_reward", "--address", address, "--upstream",
               true_address, "--seed", str(seed)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        if process.stdout.readline().strip() != READY:
            raise InternalError("the shuffling reward did not start: " + "; ".join(last_lines(log, 3)),
                                reason="CONTROL_FAILED")
        client.register_reward(section.builtin_reward, address, weight=section.builtin_reward_weight)
        yield
        client.register_reward(section.builtin_reward, true_address, weight=section.builtin_reward_weight)
    finally:
        process.terminate()
        process.wait()
