"""Durable checkpoints: what is cut, altered, missing or foreign is detected; the previous one is found; nothing half is seen."""

from __future__ import annotations

import errno
import random
import shutil
import time
from pathlib import Path

import pytest

from rollplex.core import checkpoints
from rollplex.core.checkpoints import MANIFEST, Manifest
from rollplex.core.errors import BadInput, DataLoss

FILES = {"weights/config.json": 90, "weights/model.safetensors": 700, "master.safetensors": 1100,
         "exp_avg.safetensors": 1100, "exp_avg_sq.safetensors": 1100}
"""Sizes; in the order in which they are written."""


def manifest(**changes) -> Manifest:
    return Manifest(**{"run": "r", "next_iteration": 2, "next_validation": 1, "snapshot": 2, "optimizer_step": 2,
                       "prompts_consumed": 16, "learning_rate_factor": 0.75, "seed": 3, "config": {"schedule": "overlap"},
                       "dtype": "bfloat16", "state_dtype": "float32", "layout_digest": "d", "tensor_parallel": 2,
                       "create_time_s": 12.5, **changes})


def write(folder: Path, number: int = 2, seed: int = 0) -> Path:
    path = folder / checkpoints.folder_name(number)
    partial = checkpoints.partial_of(path)
    rng = random.Random(seed + number)
    for name, size in FILES.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(rng.randbytes(size))
    checkpoints.commit(partial, path, manifest(next_iteration=number))
    return path


def is_detected(path: Path) -> bool:
    try:
        checkpoints.verify(path)
    except DataLoss:
        return True
    return False


def test_what_is_written_is_read(tmp_path):
    path = write(tmp_path / "r")
    found = checkpoints.verify(path)
    assert {name: entry.size_bytes for name, entry in found.files.items()} == FILES
    assert checkpoints.decode(checkpoints.encode(found)) == found
    assert (found.prompts_consumed, found.learning_rate_factor, found.config) == (16, 0.75, {"schedule": "overlap"})
    assert list((tmp_path / "r").iterdir()) == [path]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_every_file_cut_at_its_ends_emptied_or_gone_is_detected(tmp_path, name):
    path = write(tmp_path)
    whole = (path / name).read_bytes()
    for damaged in (whole[:-1], whole[:1], b"", whole + b"\0", whole[1:]):
        (path / name).write_bytes(damaged)
        assert is_detected(path), (name, len(damaged))
    (path / name).unlink()
    assert is_detected(path)
    (path / name).write_bytes(whole)
    assert not is_detected(path)


def test_a_foreign_file_is_detected(tmp_path):
    path = write(tmp_path)
    (path / "weights" / "more.bin").write_bytes(b"x")
    with pytest.raises(DataLoss, match="more.bin does not belong") as caught:
        checkpoints.verify(path)
    assert caught.value.metadata["file"] == "weights/more.bin"


def damaged_every_way(folder: Path, cuts: int, flips: int, seed: int = 7) -> tuple[int, int, float]:
    """Cuts the checkpoint at every file boundary and at `cuts` seeded bytes, flips `flips` seeded bits.

    A cut at byte b of the files in writing order leaves the earlier ones whole and, in turn, the later ones absent (the
    writer was killed) or present (the file system lost a file's end). Returns (damaged, detected, seconds).
    """
    path = write(folder)
    order = [*FILES, MANIFEST]
    content = {name: (path / name).read_bytes() for name in order}
    starts, total = {}, 0
    for name in order:
        starts[name], total = total, total + len(content[name])
    rng = random.Random(seed)
    places = [place for start in starts.values() for place in (start, start + 1)] + [total - 1]
    places += [rng.randrange(total) for _ in range(cuts)]
    done = found = 0
    began = time.monotonic()
    for index, place in enumerate(places):
        name = next(name for name in reversed(order) if starts[name] <= place)
        lost = [later for later in order if starts[later] > starts[name]] if index % 2 else []
        (path / name).write_bytes(content[name][:place - starts[name]])
        for later in lost:
            (path / later).unlink()
        done, found = done + 1, found + is_detected(path)
        for again in [name, *lost]:
            (path / again).write_bytes(content[again])
    for _ in range(flips):
        bit = rng.randrange(8 * total)
        name = next(name for name in reversed(order) if 8 * starts[name] <= bit)
        damaged = bytearray(content[name])
        damaged[bit // 8 - starts[name]] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        done, found = done + 1, found + is_detected(path)
        (path / name).write_bytes(content[name])
    assert not is_detected(path)
    return done, found, time.monotonic() - began


def test_cuts_and_flipped_bits_are_detected(tmp_path):
    done, found, _ = damaged_every_way(tmp_path, cuts=300, flips=300)
    assert found == done


@pytest.mark.slow
def test_ten_thousand_cuts_and_flipped_bits_are_detected(tmp_path):
    done, found, seconds = damaged_every_way(tmp_path, cuts=10_000, flips=10_000)
    print(f"{found} of {done} damaged checkpoints detected in {seconds:.1f} s")
    assert found == done


def test_every_bit_of_the_manifest_counts(tmp_path):
    raw = checkpoints.encode(checkpoints.verify(write(tmp_path)))
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataLoss):
            checkpoints.decode(bytes(damaged))


def test_another_format_is_no_corruption():
    with pytest.raises(BadInput, match="format 2") as caught:
        checkpoints.decode(checkpoints.encode(manifest(format=2)))
    assert caught.value.reason == "CHECKPOINT_FORMAT"


def test_the_previous_one_is_used_and_the_newer_one_reported(tmp_path):
    paths = [write(tmp_path, number) for number in (2, 4, 10)]
    assert checkpoints.list_checkpoints(tmp_path) == paths[::-1]
    (paths[2] / "exp_avg.safetensors").write_bytes(b"torn")
    (paths[1] / MANIFEST).unlink()
    found, problems = checkpoints.newest_valid(tmp_path)
    assert found.path == paths[0]
    assert [error.reason for error in problems] == ["CHECKPOINT_CORRUPT", "CHECKPOINT_INCOMPLETE"]
    assert "exp_avg.safetensors has 4 bytes; 1100 were written" in str(problems[0])
    assert checkpoints.newest_valid(tmp_path / "none") == (None, [])


def test_the_last_k_are_kept(tmp_path):
    paths = [write(tmp_path, number) for number in (1, 2, 3, 1_000_000)]
    checkpoints.partial_of(tmp_path / "iteration-000009").mkdir()
    assert checkpoints.prune(tmp_path, 2) == [paths[1], paths[0]]
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:])


def test_one_of_the_same_number_is_replaced(tmp_path):
    first = checkpoints.verify(write(tmp_path, 2, seed=0))
    second = checkpoints.verify(write(tmp_path, 2, seed=1))
    assert first.files != second.files
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration-000002"]


@pytest.mark.parametrize("broken", ["sync", "encode"])
def test_a_failure_while_it_is_written_leaves_nothing_to_be_seen(tmp_path, monkeypatch, broken):
    kept = write(tmp_path, 2)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, broken, fail)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 4)
    assert checkpoints.list_checkpoints(tmp_path) == [kept]
    monkeypatch.undo()
    checkpoints.discard_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]
    shutil.rmtree(kept)
