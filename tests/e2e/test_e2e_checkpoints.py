"""Nothing is lost with the node: a mesh that was down goes on from its durable checkpoint, bit for bit."""

from __future__ import annotations

import json

import pytest
from cli_rig import Cli
from runs import BASE, iterate, mixed

from rollplex.core import checkpoints

pytestmark = pytest.mark.slow

CONFIG = {**BASE, "deterministic": True, "checkpoint_every": 2, "optimizer": {
    "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1, "total_steps": 8, "weight_decay": 0.1}}


def files_of(client, run) -> dict[str, str]:
    """sha256 of the weights and the whole optimizer state, as the newest checkpoint has them."""
    found = client.durable_checkpoint(run)
    assert found.next_iteration == 4
    return {name: entry.sha256 for name, entry in checkpoints.read_manifest(checkpoints.Path(found.path)).files.items()}


def test_down_and_up_again_equals_the_unbroken_run(another_mesh, prompts, image):
    rows = mixed(prompts, image)
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


def test_train_resumes_and_the_files_are_checked(tiny_checkpoint, videos):
    small = ("--groups-per-iteration", 2, "--model", tiny_checkpoint, "--data", videos.train, "--run", "r",
             "--media-root", videos.directory, "--checkpoint-every", 1, "--set", "run.checkpoint_keep=3",
             "--set", "run.sampling.max_response_tokens=6", "--set", "run.sampling.samples_per_group=2",
             "--set", "mesh.drain_timeout_s=2", "--set", "coordinator.media.video_min_pixels=3136",
             "--set", "coordinator.media.video_max_pixels=3136", "--set", "coordinator.media.max_frames=4")
    with Cli() as cli:
        first = cli("train", "--iterations", 2, *small).result
        assert first["checkpoint"].endswith("/checkpoints/r/iteration-000002")
        assert cli("checkpoint", "verify", first["checkpoint"]).result["prompts_consumed"] == 4
        listed = cli("checkpoint", "list").result["checkpoints"]
        assert [(item["run"], item["next_iteration"]) for item in listed] == [("r", 2), ("r", 1)]
        damaged = cli.runtime_dir / "checkpoints/r/iteration-000002/exp_avg.safetensors"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        error = cli("checkpoint", "verify", first["checkpoint"]).error
        assert (error["reason"], error["metadata"]["file"]) == ("CHECKPOINT_CORRUPT", "exp_avg.safetensors")
        second = cli("train", "--iterations", 3, *small).result
        assert second["snapshot"] == 3
        lines = [json.loads(line) for line in (cli.folder / "runs/r/metrics.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in lines][-2:] == [1, 2]  # the second iteration again, and the third
