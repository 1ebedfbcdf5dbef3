"""An engine's warm-up: on its owner thread, before anything else, told to stop with the engine, and only where it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollplex.core.errors import BadInput
from rollplex.rpc.engine_server import serve_engine


class Engine:
    role, rank, layout_facts = "trainer", 0, {}

    def __init__(self, told: list[tuple[str, str]]) -> None:
        self._told = told
        self.close = lambda: self._tell("close")
        self._tell("build")

    def _tell(self, what: str) -> None:
        self._told.append((what, threading.current_thread().name))


@pytest.fixture
def address():
    with TemporaryDirectory(prefix="rp") as folder:
        yield f"unix:{folder}/s"


async def _serve(address, told, warm_up) -> None:
    await serve_engine("trainer-0", address, lambda: Engine(told), lambda server, host: "rollplex.v1.TrainerService",
                       drain_timeout_s=1.0, config={}, warm_up=warm_up)


def test_a_stop_reaches_the_warm_up_and_the_engine_closes_after_it(address):
    told: list[tuple[str, str]] = []
    begun = threading.Event()

    def warm_up(stopped) -> None:
        begun.set()
        while not stopped():
            time.sleep(0.01)
        told.append(("warmed", threading.current_thread().name))

    async def main() -> None:
        serving = asyncio.create_task(_serve(address, told, warm_up))
        await asyncio.to_thread(begun.wait, 60.0)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    asyncio.run(main())
    assert [what for what, _ in told] == ["build", "warmed", "close"]
    assert {thread for _, thread in told} == {"trainer-0-owner_0"}


def test_an_engine_whose_address_is_taken_does_not_warm_up(address):
    """It would not end before its kernels are compiled."""
    warmed = []
    path = Path(address.removeprefix("unix:"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(BadInput, match="in use"):
            asyncio.run(_serve(address, [], warmed.append))
    assert warmed == []
