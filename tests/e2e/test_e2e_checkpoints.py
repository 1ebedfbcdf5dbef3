"""Nothing is lost with the node: a mesh that was down goes on from its durable checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli
from runs import BASE, iterate

from rollplex.core import checkpoints
from rollplex_client import Prompt

pytestmark = pytest.mark.slow

CONFIG = {**BASE, "loss": {}, "deterministic": True, "checkpoint_every": 2, "optimizer": {
    "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1, "total_steps": 8, "weight_decay": 0.1}}


def files_of(client, run) -> dict[str, str]:
    """sha256 of the weights and the whole optimizer state, as the newest checkpoint has them."""
    found = client.durable_checkpoint(run)
    assert found.next_iteration == 4
    return {name: entry.sha256 for name, entry in checkpoints.read_manifest(Path(found.path)).files.items()}


def test_down_and_up_again_equals_the_unbroken_run(another_mesh, prompts):
    rows = [prompts[0], Prompt.text("How many?", ground_truth="2", problem_type="numerical")]
    with another_mesh() as mesh:
        with mesh.client as client:
            client.create_run("whole", CONFIG)
            iterate(client, "whole", rows, 4)
            unbroken = files_of(client, "whole")
            client.create_run("broken", CONFIG)
            iterate(client, "broken", rows, 2)
            assert client.durable_checkpoint("broken").next_iteration == 2
            iterate(client, "broken", rows, 1)  # lost with the node
        for name in reversed(mesh.names):
            mesh.stop(name)
        mesh.start(*mesh.names)
        with mesh.client as client:
            # Another schedule is the same computation.
            run = client.create_run("broken", {**CONFIG, "schedule": "serial"}, resume="auto")
            assert (run.next_iteration, run.snapshot) == (2, 2)
            last = iterate(client, "broken", rows, 2)
            assert (last.iteration, last.snapshot) == (3, 3)
            assert files_of(client, "broken") == unbroken


def test_train_goes_on_after_its_mesh_was_stopped(tiny_checkpoint, videos):
    """The command alone: its mesh is its own, and is down between the two."""
    options = ("--groups-per-iteration", 2, "--model", tiny_checkpoint, "--data", videos.train, "--run", "r",
               "--media-root", videos.directory, "--checkpoint-every", 1, "--set", "run.sampling.max_response_tokens=4",
               "--set", "run.sampling.samples_per_group=2", "--set", "mesh.drain_timeout_s=2",
               "--set", "coordinator.media.video_min_pixels=3136", "--set", "coordinator.media.video_max_pixels=3136",
               "--set", "coordinator.media.max_frames=4")
    with Cli() as cli:
        first = cli("train", "--iterations", 1, *options).result
        assert checkpoints.verify(Path(first["checkpoint"])).prompts_consumed == 2
        second = cli("train", "--iterations", 2, *options).result
        assert (second["iterations"], second["snapshot"]) == (2, 2)
        assert checkpoints.verify(Path(second["checkpoint"])).prompts_consumed == 4
