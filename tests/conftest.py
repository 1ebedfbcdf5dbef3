"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os

import pytest

ONE_MESH = ("e2e", "faults")
"""Directories whose `mesh` lives for the whole session."""


def pytest_collection_modifyitems(items):
    """With several processes (`-n 2 --dist loadgroup`) the tests of a file stay in one, and so do the files that share a mesh."""
    sharing = {item.path for item in items if item.path.parent.name in ONE_MESH and "mesh" in item.fixturenames}
    for item in items:
        place = item.path.parent if item.path in sharing else item.path
        item.add_marker(pytest.mark.xdist_group(place.relative_to(item.config.rootpath).as_posix()))


def pytest_collection_finish():
    """What was imported stays: no collection need look at it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A Hugging Face directory with a tiny Qwen2.5-VL of random weights, tokenizer and processor."""
    from tiny_checkpoint import save_tiny

    return save_tiny(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def tcp_security_of_its_own(monkeypatch):
    """A config's keys about TCP go into the environment (`core.tcp_security`), and not from one test into the next."""
    for name in [name for name in os.environ if name.startswith(("ROLLPLEX_TLS_", "ROLLPLEX_TOKEN_", "ROLLPLEX_INSECURE_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith("ROLLPLEX_"):
            del os.environ[name]
