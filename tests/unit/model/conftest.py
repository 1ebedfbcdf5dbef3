"""Fixtures over tiny_qwen.py, which tests import as a plain module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoint import tensor_parallel
from tiny_qwen import Bound, bind_model, build_hf, exact_float64


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def single_rank():
    with tensor_parallel():
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[bool, Path]:
    """tied? -> checkpoint directory, float64 on disk."""
    paths = {}
    for tied in (False, True):
        paths[tied] = tmp_path_factory.mktemp("checkpoint") / ("tied" if tied else "untied")
        build_hf(tied=tied, dtype=torch.float64).save_pretrained(paths[tied])
    return paths


@pytest.fixture
def bind(single_rank, checkpoints):
    def build(dtype: torch.dtype = torch.float64, *, tied: bool = False) -> Bound:
        return bind_model(checkpoints[tied], dtype)

    return build


@pytest.fixture
def exact(monkeypatch):
    exact_float64(monkeypatch.setattr)
