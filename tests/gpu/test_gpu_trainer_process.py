"""A trainer process on a GPU with the real broker: prompts with media, kill -9 after UPDATE_BEGIN, and what its successor makes
of it, against a trainer on the CPU that was left alone. The same test runs on a CPU."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_rig import broker, connect
from gpu_marks import NEEDS_GPU
from tiny_checkpoint import PromptMaker, save_tiny
from trainer_ranks import distance
from trainer_rig import TrainerClient, config, respond

from rollplex.core import work
from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.ids import state_slab
from rollplex.core.leases import LeaseMode
from rollplex.core.strict import to_plain, to_toml
from rollplex.data.processor import PromptProcessor
from rollplex.model import ActorLayout, read_model_config
from rollplex.trainer.config import TrainerConfig, TrainerSection

GPU = pytest.param("cuda", marks=NEEDS_GPU)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[SimpleNamespace]:
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"))
    section.runtime_dir.chmod(0o700)
    with broker(section), connect(section, "coordinator", "coordinator") as session:
        def deposit(name: str, fd: int, size_bytes: int) -> object:
            return session.deposit(name, fd, object_class="media", run="contract")

        prompts = PromptMaker(PromptProcessor.load(checkpoint, max_prompt_tokens=2048), deposit)
        groups = [prompts.group(kind, index) for index, kind in enumerate(["text", "image", "video", "mixed"])]
        layout = ActorLayout.build(read_model_config(checkpoint), 1, "float32")
        yield SimpleNamespace(section=section, checkpoint=checkpoint, session=session, groups=groups, layout=layout)


@contextmanager
def trainer(mesh, run: str, devices: str, folder: Path) -> Iterator[tuple[TrainerClient, subprocess.Popen]]:
    file = folder / f"{devices}.toml"
    section = TrainerSection(logprob_chunk_tokens=8, offload_pool_bytes=8 << 20)
    whole = TrainerConfig(model=ModelSection(checkpoint=mesh.checkpoint), mesh=mesh.section, trainer=section)
    file.write_text(to_toml(to_plain(whole)))
    process = subprocess.Popen([sys.executable, "-m", "rollplex.trainer", "--config", str(file), "--set",
                                f"mesh.devices={devices}", "--set", "mesh.sharing=time-slice"])
    try:
        client = TrainerClient(mesh.section.address("trainer-0"), mesh.session, run, devices=devices)
        client.command_s = client.watch_s = 300.0
        yield client, process
        client.channel.close()
    finally:
        process.terminate()
        process.wait(60)


def parameters(mesh, client: TrainerClient, snapshot: int) -> dict[str, torch.Tensor]:
    raw = torch.frombuffer(bytearray(client.actor_bytes(snapshot)), dtype=torch.uint8)
    return mesh.layout.segment_views(mesh.layout.views(raw))


def state_hash(mesh, run: str) -> str:
    with mesh.session.lease(state_slab(run, 0, "optimizer"), LeaseMode.READ) as lease, \
            Path(f"/proc/self/fd/{lease.fd}").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("saved", ["recompute", "offload"])
@pytest.mark.parametrize("devices", ["host", GPU])
def test_killed_before_the_update_and_finished_by_the_successor(mesh, devices, saved, tmp_path):
    """Teacher-forced: two updates differ from the CPU's by float32's rounding, 1e-3 of their norm at most."""
    run = f"killed-{devices}-{saved}"
    with trainer(mesh, f"left-alone-{devices}-{saved}", "host", tmp_path) as (client, _):
        client.open(config())
        client.bind(0)
        start = parameters(mesh, client, 0)
        client.iterate(mesh.groups, 0)
        client.iterate(mesh.groups, 1)
        expected = parameters(mesh, client, 2)
    with trainer(mesh, run, devices, tmp_path) as (client, process):
        client.open(config(saved_activations=saved))
        client.bind(0)
        assert all(torch.equal(value, start[name]) for name, value in parameters(mesh, client, 0).items())
        client.iterate(mesh.groups, 0)
        client.materialize(mesh.groups, 1)
        client.train(respond(mesh.groups, seed=1), 1)
        clip = min(1.0, 0.5 / client.measure().grad_norm)
        client.quiesce()
        epoch = client.begin(1)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        before = state_hash(mesh, run)
    with trainer(mesh, run, devices, tmp_path) as (client, _):
        assert state_hash(mesh, run) == before
        client.open(config(saved_activations=saved), attach=True, snapshot=1)
        client.apply(work.UpdateOrder(epoch, clip, 1.0, 2), 1)
        mesh.session.publish_snapshot(run, epoch, 2)
        client.bind(2)
        found = parameters(mesh, client, 2)
        moved = distance(found, expected, start)
        print(f"two updates on {devices} against the CPU's, {saved}: {moved:.1e} of their norm")
        assert moved < 1e-3
        assert client.iterate(mesh.groups, 2).gradient.finite


@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", ["host", GPU])
def test_a_durable_checkpoint_is_restored_bit_for_bit_on_either_device(mesh, devices, tmp_path):
    """Written beside the next iteration; the one that resumes on the same device equals the one that went on."""
    path = tmp_path / "checkpoint"
    with trainer(mesh, f"kept-{devices}", devices, tmp_path) as (client, _):
        client.open(config())
        client.bind(0)
        client.iterate(mesh.groups, 0)
        saved = parameters(mesh, client, 1)
        client.start_checkpoint(path, 1)
        client.iterate(mesh.groups, 1)
        digest = client.wait_checkpoint(path).layout_digest
        unbroken = parameters(mesh, client, 2)
    for other in dict.fromkeys(("host", devices)):
        with trainer(mesh, f"back-{devices}-{other}", other, tmp_path) as (client, _):
            client.open(config(), register=False)
            client.restore(path, 1, digest)
            mesh.session.register_snapshot(client.run, [client.slab], 1)
            client.bind(1)
            restored = parameters(mesh, client, 1)
            client.iterate(mesh.groups, 1)
            found = parameters(mesh, client, 2)
        assert all(torch.equal(restored[name], saved[name]) for name in saved), other
        assert distance(found, unbroken, saved) <= (1e-3 if other != devices or devices == "cuda" else 0), other
