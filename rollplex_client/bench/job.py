"""The job that every arm and every other trainer does: prompts, lengths, rewards and the update, and what it needs at least."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.core.ids import sample_seed
from rollplex.core.model_work import GroupWork, ModelWork, PromptSize
from rollplex.core.response_lengths import LengthDistribution
from rollplex.core.shapes import read_shapes
from rollplex_client.prompts import Media, Prompt

MATH_BYTES = {"cuda": 2, "cpu": 4}
"""Of a weight in rollout: bfloat16 on a GPU, float32 on a CPU."""


@dataclass(frozen=True)
class Job:
    """Fixed before anything starts."""

    device: str
    checkpoint: Path
    media_root: Path
    workload: dict[str, Any]
    """workload.json of `rollplex.bench`: videos, texts, clips, prompt_tokens, grid_thw."""
    samples: int
    iterations: int
    mean_response: float
    max_response: int
    kl_coef: float
    seed: int
    learning_rate: float = 1e-6
    micro_batch_samples: int = 0
    """RunConfig.suffix_micro_batch_samples."""

    @property
    def groups(self) -> int:
        return len(self.workload["videos"])

    @property
    def prompt_tokens(self) -> int:
        return self.workload["prompt_tokens"]

    @property
    def item_bytes(self) -> int:
        return MATH_BYTES[self.device]

    @property
    def length_distribution(self) -> str:
        return f"lognormal:{self.mean_response:g}:{self.max_response}"

    @cached_property
    def model(self) -> ModelWork:
        return ModelWork(read_shapes(self.checkpoint))

    @cached_property
    def prompt_size(self) -> PromptSize:
        down, across = self.workload["grid_thw"][1:]
        return PromptSize(self.prompt_tokens, ((self.workload["grid_thw"][0], down, across),))

    def lengths(self, iteration: int) -> list[list[int]]:
        """Of every sample of every group: a prompt's ordinal counts on through the iterations of a run."""
        drawn = LengthDistribution(self.mean_response, self.max_response)
        return [[drawn.length(sample_seed(self.seed, iteration, iteration * self.groups + group, sample))
                 for sample in range(self.samples)] for group in range(self.groups)]

    def work(self, iteration: int) -> list[GroupWork]:
        return [GroupWork(self.prompt_size, tuple(row)) for row in self.lengths(iteration)]

    def prompts(self) -> list[Prompt]:
        """The same in every iteration."""
        return [Prompt.text(text, Media("video", path))
                for path, text in zip(self.workload["videos"], self.workload["texts"], strict=True)]

    def run_config(self, schedule: str) -> dict[str, Any]:
        """[run] of an arm."""
        return {"seed": self.seed, "schedule": schedule, "suffix_micro_batch_samples": self.micro_batch_samples,
                "sampling": {"samples_per_group": self.samples, "temperature": 1.0, "max_response_tokens": self.max_response,
                             "length_distribution": self.length_distribution},
                "loss": {"kl_coef": self.kl_coef, "aggregation": "token-mean", "advantage": "grpo"},
                "optimizer": {"learning_rate": self.learning_rate}}

    def plain(self) -> dict[str, Any]:
        """For the JSON of the results."""
        lengths = [sum(map(sum, self.lengths(iteration))) for iteration in range(self.iterations)]
        return {"device": self.device, "checkpoint": self.checkpoint.name, "groups": self.groups, "samples": self.samples,
                "iterations": self.iterations, "prompt_tokens": self.prompt_tokens,
                "media_tokens": self.workload["media_tokens"], "grid_thw": self.workload["grid_thw"],
                "clips": self.workload["clips"], "length_distribution": self.length_distribution,
                "response_tokens": lengths, "longest_response": max(
                    length for iteration in range(self.iterations) for row in self.lengths(iteration) for length in row),
                "kl_coef": self.kl_coef, "seed": self.seed, "learning_rate": self.learning_rate,
                "micro_batch_samples": self.micro_batch_samples,
                "step_flops": [self.model.step(self.work(iteration), reference=self.kl_coef > 0)
                               for iteration in range(self.iterations)]}


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raises BadInput for options that make no job."""
    for name, least in (("prompt_tokens", 1), ("groups", 1), ("samples", 2), ("iterations", 2), ("max_response_tokens", 1),
                        ("micro_batch_samples", 0)):
        if getattr(arguments, name) < least:
            raise BadInput(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least {least}"
                           + (": the first is left out" if name == "iterations" else ""), reason="BAD_JOB")
    if not 1 <= arguments.response_tokens <= arguments.max_response_tokens:
        raise BadInput(f"--response-tokens is {arguments.response_tokens:g}; it must be between 1 and --max-response-tokens, "
                       f"{arguments.max_response_tokens}", reason="BAD_JOB")


def make_job(arguments: argparse.Namespace, built: dict[str, Any]) -> Job:
    """Of options that were checked, and what `rollplex.bench` built."""
    return Job(arguments.device, Path(built["checkpoint"]), Path(built["media_root"]), built["workload"], arguments.samples,
               arguments.iterations, arguments.response_tokens, arguments.max_response_tokens, arguments.kl_coef,
               arguments.seed, micro_batch_samples=arguments.micro_batch_samples)
