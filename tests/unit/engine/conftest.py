"""Fixtures over tiny_checkpoint.py, which tests import as a plain module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoint import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("tiny"))
