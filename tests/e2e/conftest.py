"""One mesh of real processes for all end-to-end tests, over the demo's videos and a model of random weights."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hand_mesh import HandMesh

from rollplex.data.datasets import read_dataset
from rollplex_client import prompt_from_row

TOKEN_SUM = Path(__file__).parents[1] / "support" / "token_sum.py"


@pytest.fixture(scope="session")
def videos(tmp_path_factory):
    """The demo's files: 80 training rows, 16 held-out ones."""
    from rollplex.demo.videos import make_videos

    return make_videos(tmp_path_factory.mktemp("videos"), seed=0, train_rows=80, heldout_rows=16)


@pytest.fixture(scope="session")
def prompts(videos):
    return [prompt_from_row(row) for row in read_dataset(videos.train, media_root=videos.directory)]


@pytest.fixture(scope="session")
def mesh(tiny_checkpoint, videos):
    with hand_mesh(tiny_checkpoint, videos) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def another_mesh(tiny_checkpoint, videos):
    """another_mesh(...): a mesh of other sizes until the end of the context; arguments of HandMesh."""
    return lambda **options: hand_mesh(tiny_checkpoint, videos, **options)


@pytest.fixture(scope="session")
def image(videos):
    from PIL import Image

    path = videos.directory / "still.png"
    Image.new("RGB", (84, 56), (200, 30, 30)).save(path)
    return path


@contextmanager
def hand_mesh(checkpoint, videos, **options):
    mesh = HandMesh(checkpoint, videos.directory, **options)
    try:
        mesh.start(*mesh.names)
        with served_reward(mesh.runtime_dir / "ids.sock") as address, mesh.client as client:
            client.register_reward("ids", address)
            yield mesh
    finally:
        mesh.close()


@contextmanager
def served_reward(socket):
    process = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward", f"{TOKEN_SUM}:token_sum", "--address",
                                f"unix:{socket}"])
    try:
        yield f"unix:{socket}"
    finally:
        process.terminate()
        process.wait(10)
