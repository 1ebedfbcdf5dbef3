from __future__ import annotations

import gc
import random

import pytest
import torch

from rollplex.core.errors import OutOfMemory
from rollplex.memory.free_list import ALIGNMENT_BYTES, FreeList
from rollplex.memory.pinned_pool import PinnedPool


def check_invariants(free_list: FreeList) -> None:
    pieces = sorted([*free_list.holes.items(), *free_list.taken.items()])
    assert sum(size for _, size in pieces) == free_list.size_bytes
    for (offset, size), (after, _) in zip(pieces, pieces[1:]):
        assert offset + size == after
    holes = sorted(free_list.holes.items())
    assert all(offset + size < after for (offset, size), (after, _) in zip(holes, holes[1:])), "unjoined neighbours"
    assert free_list.used_bytes == sum(free_list.taken.values())


def test_random_allocation_keeps_the_invariants():
    rng = random.Random(0)
    free_list = FreeList(64 * 1024)
    held: list[int] = []
    refused = 0
    for _ in range(3000):
        if held and rng.random() < 0.48:
            free_list.free(held.pop(rng.randrange(len(held))))
        else:
            try:
                held.append(free_list.allocate(rng.randrange(0, 4000)))
                assert held[-1] % ALIGNMENT_BYTES == 0
            except OutOfMemory:
                refused += 1
        check_invariants(free_list)
    assert refused
    for offset in held:
        free_list.free(offset)
    assert free_list.holes == {0: 64 * 1024}
    assert free_list.used_bytes == 0 < free_list.peak_bytes


def test_best_fit_takes_the_smallest_hole():
    free_list = FreeList(1024)
    first, _, second, _ = (free_list.allocate(size) for size in (256, 64, 128, 64))
    free_list.free(first)
    free_list.free(second)
    assert free_list.allocate(128) == second


def test_exhausted_says_the_numbers():
    free_list = FreeList(256)
    offsets = [free_list.allocate(64) for _ in range(4)]
    free_list.free(offsets[0])
    free_list.free(offsets[2])
    with pytest.raises(OutOfMemory, match="128 bytes do not fit the pool: 128 of 256 are free, the largest piece has 64"):
        free_list.allocate(100)


def test_double_free_is_an_error():
    free_list = FreeList(256)
    offset = free_list.allocate(1)
    free_list.free(offset)
    with pytest.raises(ValueError, match="nothing is allocated"):
        free_list.free(offset)


@pytest.fixture
def pool():
    return PinnedPool(torch.zeros(4096, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8])
def test_put_and_get_give_the_same_tensor(pool, dtype):
    tensor = torch.arange(24).view(4, 6).to(dtype).t()
    handle = pool.put(tensor)
    for _ in range(2):
        assert torch.equal(pool.get(handle), tensor)
        assert pool.get(handle).dtype == dtype
    pool.get(handle).zero_()
    assert torch.equal(pool.get(handle), tensor), "get gives a copy"


def test_scalars_and_empty_tensors(pool):
    assert pool.get(pool.put(torch.tensor(3.5))) == 3.5
    assert pool.get(pool.put(torch.empty(0, 3))).shape == (0, 3)


def test_bytes_are_freed_by_hand_and_by_garbage(pool):
    kept = pool.put(torch.ones(16))
    other = pool.put(torch.ones(16))
    other.free()
    other.free()
    assert pool.used_bytes == 64
    del kept
    gc.collect()
    assert pool.used_bytes == 0
    assert pool.peak_bytes == 128


def test_full_pool_is_refused_and_unchanged(pool):
    held = pool.put(torch.zeros(4000, dtype=torch.uint8))
    with pytest.raises(OutOfMemory) as caught:
        pool.put(torch.zeros(1000, dtype=torch.uint8))
    assert caught.value.metadata["largest_bytes"] == "64"
    held.free()
    assert pool.used_bytes == 0


def test_saved_tensor_hooks_give_the_same_gradient(pool):
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    value = torch.randn(8, 8, dtype=torch.float64)

    def loss():
        return ((value @ weight).tanh() @ weight).pow(2).sum()

    expected, = torch.autograd.grad(loss(), weight)
    with torch.autograd.graph.saved_tensors_hooks(pool.put, pool.get):
        result = loss()
        assert pool.used_bytes
    found, = torch.autograd.grad(result, weight)
    del result
    gc.collect()
    assert torch.equal(found, expected)
    assert pool.used_bytes == 0
