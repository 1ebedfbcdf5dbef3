"""A run that was recorded on the CPU, trained on again on a GPU: the updates agree, and restarts change nothing. The same tests
run on a CPU, where the updates are the recorded ones to the bit."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from figures import ON_CPU, figure
from gpu_marks import NEEDS_GPU
from hand_mesh import HandMesh
from runs import BASE, distance, iterate, mixed, weights_of
from slab_hashes import SlabHashes
from supervised_mesh import served_reward

from rollplex.data.datasets import read_dataset
from rollplex.demo.videos import make_videos
from rollplex_client import prompt_from_row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GPU = pytest.param("cuda", marks=NEEDS_GPU)
DEVICES = [pytest.param("host", marks=ON_CPU), GPU]
SUPPORT = Path(__file__).parents[1] / "support"
ITERATIONS = 3
SERVICES = ("trainer-0", "reference-0", "rollout-0", "broker", "coordinator")


def hand_mesh(checkpoint: Path, videos: Path, devices: str, **coordinator) -> HandMesh:
    """Started by hand: no MPS."""
    return HandMesh(checkpoint, videos, sizes={"devices": devices, "sharing": "time-slice"}, coordinator=coordinator)


@pytest.fixture(scope="module")
def recorded(tiny_checkpoint, tmp_path_factory) -> SimpleNamespace:
    """Three iterations on real videos, an image and text, in float32 on the CPU: the journal, the weights before and after."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("recorded")
    videos = make_videos(folder / "videos", seed=0, train_rows=80, heldout_rows=16)
    image = videos.directory / "still.png"
    Image.new("RGB", (84, 56), (200, 30, 30)).save(image)
    prompts = mixed([prompt_from_row(row) for row in read_dataset(videos.train, media_root=videos.directory)][:2], image)
    mesh = hand_mesh(tiny_checkpoint, videos.directory, "host")
    try:
        mesh.start(*mesh.names)
        with served_reward(mesh.runtime_dir / "ids.sock") as address, mesh.client as client:
            client.register_reward("ids", address)
            run = client.create_run("recorded", {**BASE, "schedule": "serial", "deterministic": True}).name
            start = weights_of(client, run, folder / "start")
            last = iterate(client, run, prompts, ITERATIONS)
            assert last.metrics["rollplex/update_skipped"] == 0.0
            end = weights_of(client, run, folder / "end")
        journal = folder / "journal.sqlite"
        with closing(sqlite3.connect(mesh.runtime_dir / "journal.sqlite")) as source, closing(sqlite3.connect(journal)) as copy:
            source.backup(copy)
    finally:
        mesh.close()
    return SimpleNamespace(run=run, journal=journal, videos=videos.directory, start=start, end=end)


@pytest.mark.parametrize("devices", DEVICES)
def test_a_run_recorded_on_the_cpu_gives_the_same_updates_and_restarts_change_nothing(
        tiny_checkpoint, recorded, devices, tmp_path):
    """float32, TF32 off: 1e-3 of the updates' norm. Before the last iteration every service is killed and started again."""
    mesh = hand_mesh(tiny_checkpoint, recorded.videos, devices, replay_journal=str(recorded.journal))
    hashes = SlabHashes(mesh.mesh, lambda: mesh.pid("broker"))
    try:
        mesh.start(*mesh.names)
        with mesh.client as client:
            run = client.create_run("again", {"replay": recorded.run, "schedule": "overlap"}).name
            begun = weights_of(client, run, tmp_path / "begun")
            assert all(begun[name].tobytes() == value.tobytes() for name, value in recorded.start.items())
            for _ in range(ITERATIONS - 1):
                done = client.wait(client.replay_iteration(run))
                assert done.metrics["rollplex/update_skipped"] == 0.0
            before = hashes.actor(run, ITERATIONS - 1), hashes.state(run), hashes.journal(run)
            for name in SERVICES:
                mesh.kill(name)
                mesh.start(name)
                assert (hashes.actor(run, ITERATIONS - 1), hashes.state(run), hashes.journal(run)) == before, name
            client.wait(client.replay_iteration(run))
            assert hashes.actor(run, ITERATIONS) != before[0] and hashes.state(run) != before[1]
            error = distance(weights_of(client, run, tmp_path / "end"), recorded.end, recorded.start)
        figure("replay of a CPU run", devices=devices, updates=ITERATIONS, relative_difference=error)
        assert error <= (1e-3 if devices == "cuda" else 0.0)
    finally:
        hashes.dismiss()
        mesh.close()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("saved", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_boundary_of_another_process_is_the_same_to_the_bit(tiny_checkpoint, devices, dtype, saved):
    found = {subprocess.run(
        [sys.executable, str(SUPPORT / "boundary_hash.py"), str(tiny_checkpoint), f"{devices}:0", dtype, saved], text=True,
        capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout.strip() for _ in range(2)}
    assert len(found) == 1 and len(found.pop()) == 64
