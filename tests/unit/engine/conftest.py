"""Fixtures over tiny_checkpoint.py, which tests import as a plain module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_checkpoint import save_tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("tiny"))
