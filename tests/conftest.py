"""Fixtures that all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A Hugging Face directory with a tiny Qwen2.5-VL of random weights, tokenizer and processor."""
    from tiny_checkpoint import save_tiny

    return save_tiny(tmp_path_factory.mktemp("checkpoint"))
