"""A fake coordinator on a Unix socket of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # pytest's own folders are too long for the 107 bytes of a socket's path.
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        yield Path(folder) / "coordinator.sock"


@pytest.fixture
def fake(socket_path: Path) -> Iterator[object]:
    from fake_coordinator import FakeCoordinator

    coordinator = FakeCoordinator(socket_path)
    yield coordinator
    coordinator.stop()
