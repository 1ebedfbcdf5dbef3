"""Fixtures over tiny_trainer.py, which tests import as a plain module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import tensor_parallel
from tiny_trainer import DictBroker, build_hf, open_engine

from rollplex.trainer.engine import TrainerEngine


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "tiny"
    build_hf(torch.float64).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def single_rank():
    with tensor_parallel():
        yield


@pytest.fixture
def build_engine(checkpoint, single_rank) -> Iterator[Callable[..., TrainerEngine]]:
    """build(broker, dtype) -> engine. One lives at a time: building the next ends the one before, as a restart does."""
    engines: list[TrainerEngine] = []

    def build(broker: DictBroker, dtype: torch.dtype = torch.float64, **options) -> TrainerEngine:
        while engines:
            engines.pop().close()
        engines.append(open_engine(broker, checkpoint, dtype, **options))
        return engines[0]

    yield build
    while engines:
        engines.pop().close()
