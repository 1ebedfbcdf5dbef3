"""The link to a keeper that the test plays."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollplex.broker.keeper_link import KeeperLink
from rollplex.rpc.handles import listen, recv_frame_async, send_frame, wait_readable


class PlayedKeeper:
    """Says yes to everything, to one connection."""

    def __init__(self, path):
        self.listener = listen(path)
        self.listener.setblocking(False)
        self.names = []
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        await wait_readable(self.listener.fileno())
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        with contextlib.closing(connection):
            while frame := await recv_frame_async(connection):
                self.names.append(frame[0].get("name", frame[0]["op"]))
                send_frame(connection, {"ok": True, "records": 0})

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.listener.close()


@pytest.fixture
async def link(tmp_path):
    made = KeeperLink(tmp_path / "k.sock", timeout_s=0.4)
    first = PlayedKeeper(tmp_path / "k.sock")
    assert await asyncio.to_thread(made.adopt) == []
    made.follow(list)
    await first.stop()
    yield made
    await made.close()


async def test_forgetting_ends_with_the_keepers_answer_or_with_the_keeper(link, tmp_path):
    await link.forget("slab/of-nobody-s")  # the link is down: whoever comes back is given what there is
    keeper = PlayedKeeper(tmp_path / "k.sock")
    await link.put("slab/a", {}, None)
    await link.forget("slab/a")
    assert keeper.names.count("slab/a") == 2
    await keeper.stop()
    await asyncio.wait_for(link.forget("slab/b"), 2.0)


async def test_a_waiting_put_does_not_wait_for_the_back_off(link, tmp_path):
    await asyncio.sleep(0.9)  # retries are at 0.05, 0.15, 0.35, 0.75 and 1.55 s after the loss
    keeper = PlayedKeeper(tmp_path / "k.sock")
    await link.put("slab/s", {}, None)
    assert keeper.names == ["refill", "refilled", "slab/s"]
    await keeper.stop()


async def test_a_put_that_waits_already_is_there_when_the_keeper_comes(link, tmp_path):
    await asyncio.sleep(0.9)
    putting = asyncio.create_task(link.put("slab/s", {}, None))
    await asyncio.sleep(0.1)
    keeper = PlayedKeeper(tmp_path / "k.sock")
    await putting
    assert keeper.names == ["refill", "refilled", "slab/s"]
    await keeper.stop()
