from __future__ import annotations

import pytest
import torch

from rollplex.engine.hbm_share import GIB, allocator_fraction, bound_allocator


@pytest.mark.parametrize(("budget", "share", "fraction"), [
    (0, 0, 1), (40, 0, 0.5), (0, 20, 0.25), (40, 20, 0.25), (20, 40, 0.25), (200, 0, 1)])
def test_the_smaller_bound_counts_and_never_more_than_the_gpu(budget, share, fraction):
    assert allocator_fraction(80 * GIB, budget, share) == fraction


def test_a_host_has_no_allocator_to_bound():
    bound_allocator(torch.device("cpu"), budget_gib=1, share_gib=1)
