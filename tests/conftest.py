"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal

import pytest

ONE_MESH = {"tests/faults/test_faults_": "faults", "tests/e2e/test_e2e_mesh": "e2e", "tests/e2e/test_e2e_recovery": "e2e",
            "tests/e2e/test_e2e_ablations": "e2e"}
"""How the names of files begin that share a mesh which lives for the whole session."""
LONG = ("e2e", "faults")
"""Directories of files that take longest."""


def pytest_configure():
    """Started in the background (`make test &`) they ignore SIGINT, and so would the commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Long files first, so that of several processes none waits long for the last file of another."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several processes (`pytest -n 2`) one gets a whole file, or all files that share a mesh; the first files first."""
    from xdist.scheduler import LoadScopeScheduling

    class ByMesh(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((mesh for start, mesh in ONE_MESH.items() if file.startswith(start)), file)

    config.option.loadscopereorder = False
    return ByMesh(config, log)


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
