"""What a worker takes for numbers is what the leader put, in its own process and in another."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollplex.rollout.vllm_patches import PatchReader, SharedPatches

WIDTH = 6


@pytest.fixture
def shared():
    made = SharedPatches()
    yield made
    made.drop()


@pytest.fixture
def reader():
    return PatchReader(os.getpid(), WIDTH, torch.bfloat16, torch.device("cpu"))


def patches(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_numbers_stand_for_their_patches(shared, reader):
    wanted = patches(50, 0)
    numbers = shared.put(3, wanted)
    assert numbers.dtype == torch.int64 and numbers.shape == (50, 1)
    assert torch.equal(reader.take(numbers), wanted)


def test_slices_of_several_puts_in_one_are_their_patches_in_that_order(shared, reader):
    """As vLLM cuts the media of a prompt apart and puts those of a step together."""
    first, second = patches(40, 1), patches(30, 2)
    numbers = shared.put(0, first), shared.put(1, second)
    joined = torch.cat([numbers[1][10:20], numbers[0][:5], numbers[0][5:9], numbers[0][20:40], numbers[1][20:], numbers[1][:1]])
    wanted = torch.cat([second[10:20], first[:9], first[20:40], second[20:], second[:1]])
    assert torch.equal(reader.take(joined), wanted)


def test_another_process_takes_them(shared, reader):
    wanted = patches(20, 3)
    numbers = shared.put(0, wanted)
    code = f"""
        import torch
        from rollplex.rollout.vllm_patches import PatchReader
        reader = PatchReader({os.getpid()}, {WIDTH}, torch.bfloat16, torch.device("cpu"))
        print(float(reader.take(torch.tensor({numbers[4:9].tolist()})).double().sum()))
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True).stdout
    assert float(said) == float(wanted[4:9].double().sum())


def test_what_was_dropped_is_gone_and_nothing_else(shared, reader):
    kept, dropped = (shared.put(group, patches(8, group)) for group in (0, 1))
    shared.put(1, patches(4, 9))
    before = len(list(Path("/proc/self/fd").iterdir()))
    shared.drop([1, 7])
    shared.drop([1])
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    assert torch.equal(reader.take(kept), patches(8, 0))
    with pytest.raises(OSError):
        reader.take(dropped)
    # The descriptor of a closed file is the next one's.
    later = shared.put(2, patches(8, 5))
    with pytest.raises(FileNotFoundError, match="dropped"):
        reader.take(dropped)
    assert torch.equal(reader.take(later), patches(8, 5))
    shared.drop()
    with pytest.raises(OSError):
        reader.take(kept)


def test_nobody_takes_them_from_a_process_that_is_gone(shared, reader):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(FileNotFoundError):
        replace(reader, leader=gone.pid).take(shared.put(0, patches(2, 0)))
