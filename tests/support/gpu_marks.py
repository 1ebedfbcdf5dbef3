"""Marks of what only a GPU runs: `make test-gpu` selects it, and where there is none it is skipped with a reason."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
"""For a module's `pytestmark` and for `pytest.param(..., marks=...)`."""


NEEDS_TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")]


def needs_gpu(test):
    """The same, of one test."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test
