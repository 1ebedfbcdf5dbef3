"""Six services started by hand train on real videos: exactness of the schedules, one actor, media once, kill anything."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import actor_mappings, iterate, mixed, new_run, weights_of

from rollplex.core.errors import AlreadyExists, BadInput, Forbidden, NotFound
from rollplex.demo.videos import encode
from rollplex_client import Media, Prompt
from rollplex_client.results import Progress

pytestmark = pytest.mark.slow

def test_serial_and_overlap_give_bit_identical_snapshots(mesh, prompts, image, tmp_path):
    results = {}
    with mesh.client as client:
        for schedule in ("serial", "overlap"):
            run = new_run(client, schedule=schedule, deterministic=True, saved_activations="recompute")
            last = iterate(client, run, mixed(prompts, image), 3)
            assert last.metrics["rollplex/update_skipped"] == 0.0
            results[schedule] = weights_of(client, run, tmp_path / schedule)
    assert results["serial"].keys() == results["overlap"].keys()
    changed = [name for name in results["serial"]
               if results["serial"][name].tobytes() != results["overlap"][name].tobytes()]
    assert changed == []


def test_training_moves_the_weights_and_other_prompts_move_them_elsewhere(mesh, prompts, tmp_path):
    """What the comparison above could miss: that nothing is trained, or everything the same."""
    with mesh.client as client:
        results = []
        for index, chosen in enumerate((prompts[:4], prompts[4:8])):
            run = new_run(client, deterministic=True)
            if not results:
                results.append(weights_of(client, run, tmp_path / "start"))
            iterate(client, run, chosen)
            results.append(weights_of(client, run, tmp_path / str(index)))
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    start, first, second = (result[name] for result in results)
    assert (start != first).any()
    assert (first != second).any()


def test_there_is_one_actor(mesh, prompts):
    with mesh.client as client:
        run = new_run(client)
        iterate(client, run, prompts[:2])
        rollout, trainer = (actor_mappings(mesh.pid(name)) for name in ("rollout-0", "trainer-0"))
        assert len(rollout) == 1
        assert rollout == trainer
        rows = [row for row in client.mesh().ledger if row.object_class == "actor_snapshot"]
    assert [(row.slab_count, row.size_bytes) for row in rows] == [(1, next(iter(rollout))[2])] or (
        len(rows) == 1 and rows[0].slab_count == 1 and 0 <= next(iter(rollout))[2] - rows[0].size_bytes < 4096)
    assert actor_mappings(mesh.pid("broker")) == set()


LONG_FRAMES, LONG_BYTES = 64, 64 * 56 * 56 * 3


@pytest.fixture(scope="module")
def long_prompts(videos):
    """64 prompts with a video of 602 kB of frames each."""
    files = []
    for index in range(8):
        path = videos.directory / f"long-{index}.mp4"
        frames = np.random.default_rng(index).integers(0, 255, (LONG_FRAMES, 56, 56, 3), dtype=np.uint8)
        with path.open("wb") as file:
            encode(frames, file)
        files.append(path)
    return [Prompt.text("Which direction?", Media("video", files[index % 8]), ground_truth="A",
                        problem_type="multiple choice") for index in range(64)]


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process: what it has copied, not what it maps."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def test_media_is_held_once_a_prompt(mesh, long_prompts):
    """64 groups of video, 8 samples each: one slab a prompt in the ledger, gone afterwards, and nobody holds copies."""
    names, media_bytes = ("coordinator", "broker", "rollout-0", "trainer-0", "reference-0"), 64 * LONG_BYTES
    peaks, ledgers = dict.fromkeys(names, 0), []
    with mesh.client as client:
        run = new_run(client, sampling={"samples_per_group": 8, "max_response_tokens": 4}, saved_activations="recompute",
                      optimizer={"vision_learning_rate": 0.0})
        iterate(client, run, long_prompts[:8])
        before = {name: own_bytes(mesh.pid(name)) for name in names}

        def look(event):
            peaks.update({name: max(peaks[name], own_bytes(mesh.pid(name)) - before[name]) for name in names})
            if isinstance(event.body, Progress) and not ledgers:
                ledgers.append(client.mesh().ledger)

        client.wait(client.submit_iteration(run, long_prompts), on_event=look)
        media = [row for row in ledgers[0] if row.object_class == "media"]
        assert [(row.slab_count, row.size_bytes) for row in media] == [(64, media_bytes)]
        assert [row for row in client.mesh().ledger if row.object_class == "media"] == []
    # Who reads no pixels copies nothing. Engines have patches of one prompt and activations of all, which together stay
    # below what a copy of the frames for every sample would take alone.
    assert all(peaks[name] < media_bytes for name in ("coordinator", "broker")), peaks
    assert all(peak < 8 * media_bytes for peak in peaks.values()), peaks


@pytest.mark.parametrize("name", ["rollout-0", "reference-0", "trainer-0", "broker", "keeper", "coordinator", "reward"])
def test_any_service_can_be_killed_and_started_again(mesh, prompts, tmp_path, name):
    """The next iteration is served, on the same run, whose snapshot goes on from where it was."""
    with mesh.client as client:
        run = new_run(client, deterministic=True)
        iterate(client, run, prompts[:2])
        before = weights_of(client, run, tmp_path / "before")
        mesh.kill(name)
        mesh.start(name)
        again = weights_of(client, run, tmp_path / "again")
        assert all(before[key].tobytes() == again[key].tobytes() for key in before)
        iterate(client, run, prompts[2:4])
        assert client.get_run(run).snapshot == 2


def test_a_restart_changes_nothing_in_what_is_learned(mesh, prompts, tmp_path):
    with mesh.client as client:
        results = []
        for restart in (False, True):
            run = new_run(client, deterministic=True)
            iterate(client, run, prompts[:2])
            if restart:
                for name in ("trainer-0", "rollout-0", "reference-0"):
                    mesh.kill(name)
                    mesh.start(name)
            iterate(client, run, prompts[2:4])
            results.append(weights_of(client, run, tmp_path / str(restart)))
    assert all(results[0][key].tobytes() == results[1][key].tobytes() for key in results[0])


def test_sigterm_drains(mesh, prompts):
    for name in ("reward", "rollout-0"):
        assert mesh.stop(name) == 0
        assert not (mesh.runtime_dir / f"{name}.sock").exists()
        mesh.start(name)
    with mesh.client as client:
        iterate(client, new_run(client), prompts[:2])


def test_bad_prompts_are_refused_by_index(mesh, prompts, videos, tmp_path):
    empty, text = videos.directory / "empty.mp4", videos.directory / "text.mp4"
    empty.write_bytes(b"")
    text.write_text("no video")
    outside = tmp_path / "outside.mp4"
    shutil.copy(prompts[0].media[0].path, outside)
    link = videos.directory / "link.mp4"
    link.symlink_to(outside)

    def video(path):
        return Prompt.text("?", Media("video", path), ground_truth="A", problem_type="multiple choice")

    bad = {1: video(empty), 2: video(text), 3: video(videos.directory / "none.mp4"), 4: video(outside), 5: video(link),
           6: Prompt([{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]),
           7: Prompt.text("")}
    with mesh.client as client:
        run = new_run(client)
        with pytest.raises(BadInput) as refused:
            client.submit_iteration(run, [prompts[0], *bad.values()])
        assert refused.value.metadata["indices"] == "1,2,3,4,5,6,7"
        for index in bad:
            assert f"prompt {index}: " in str(refused.value)
        with pytest.raises((BadInput, Forbidden), match="outside"):
            client.submit_iteration(run, [video(outside)])
        assert client.get_run(run).next_iteration == 0
        iterate(client, run, prompts[:1])


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(mesh):
    with mesh.client as client:
        run = new_run(client)
        with pytest.raises(BadInput, match="16384"):
            client.submit_iteration(run, [Prompt.text("left " * 20000)])


def test_runs_by_name(mesh):
    with mesh.client as client:
        run = new_run(client)
        with pytest.raises(AlreadyExists):
            client.create_run(run, {"seed": 9})
        with pytest.raises(NotFound):
            client.get_run("nobody")


@pytest.mark.parametrize("changes", [
    {"loss": {"aggregation": "token-mean", "ratio_level": "sequence", "importance_correction": "token"}},
    {"optimizer": {"updates_per_iteration": 2}, "loss": {"advantage": "rloo", "kl_estimator": "k1"}},
    {"saved_activations": "offload", "suffix_micro_batch_samples": 2},
    {"optimizer": {"vision_learning_rate": 0.0, "projector_learning_rate": 0.0}, "filter_zero_variance": True},
], ids=["gspo", "two-updates", "offload", "frozen-tower"])
def test_options_run(mesh, prompts, changes):
    with mesh.client as client:
        run = new_run(client, **changes)
        done = iterate(client, run, prompts[:4])
    assert done.state == "done"
