"""Both clients against a fake coordinator: calls, errors, and watches that survive a restart of the server."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollplex.core.errors import BadInput, NotFound, Unavailable, WrongState
from rollplex.rpc.status import to_detail
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1 import types_pb2
from rollplex_client import AsyncClient, Client, Media, Prompt
from rollplex_client.results import Iteration, Note, PhaseSpan, Progress

PROMPT = Prompt.text("How many?", Media("video", "/data/a.mp4"), ground_truth="2")


@pytest.fixture
def client(fake):
    with Client(fake.address) as client:
        client.create_run("r", {"schedule": "serial"})
        yield client


def test_runs_and_iterations_come_back_as_dataclasses(client, fake):
    assert client.get_run("r").config["schedule"] == "serial"
    assert [run.name for run in client.list_runs()] == ["r"]
    result = client.wait(client.submit_iteration("r", [PROMPT]))
    assert (result.state, result.metrics["reward"], result.validation) == ("done", 1.0, False)
    validation = client.wait(client.submit_validation("r", [PROMPT]))
    assert validation.validation
    assert fake.submitted[0][0].media[0].path == "/data/a.mp4"


def test_samples_rewards_export_and_mesh(client):
    first, second = client.list_samples("r", 0)
    assert (first.token_ids, first.reward, first.parts) == ((1, 2), 1.5, {"video_r1/accuracy": 1.0})
    assert (second.reward, second.advantage, second.token_ids) == (None, None, ())
    assert client.register_reward("short", "unix:/x", weight=0.5).weight == 0.5
    assert client.list_rewards()[0].reachable
    client.unregister_reward("short")
    assert client.export_checkpoint("r", "/tmp/out").path == "/tmp/out"
    mesh = client.mesh()
    assert (mesh.services[0].pid, mesh.phase, mesh.ledger_peaks[0].phase) == (7, "idle", "overlap")


def test_the_same_request_id_gives_the_same_iteration(client, fake):
    handles = [client.submit_iteration("r", [PROMPT], request_id="once") for _ in range(2)]
    assert handles[0] == handles[1]
    assert len(fake.submitted) == 1


def test_errors_keep_kind_reason_and_numbers(client, fake):
    with pytest.raises(NotFound) as raised:
        client.get_run("nope")
    assert (raised.value.reason, raised.value.metadata) == ("RUN_NOT_FOUND", {"run": "nope"})
    fake.bad_texts = {"bad"}
    with pytest.raises(BadInput) as refused:
        client.submit_iteration("r", [PROMPT, Prompt.text("bad")])
    assert refused.value.metadata["indices"] == "1"
    with pytest.raises(NotFound):
        next(client.watch("nope"))


def test_mistakes_are_found_before_anything_is_sent(client, fake):
    with pytest.raises(BadInput, match="schedule"):
        client.create_run("r2", {"scheduel": "serial"})
    with pytest.raises(BadInput, match="at least one"):
        client.submit_iteration("r", [])
    with pytest.raises(BadInput, match="run name"):
        client.create_run("No Good")
    assert set(fake.runs) == {"r"}


def test_a_failed_iteration_raises_its_error(client, fake):
    fake.instant = False
    handle = client.submit_iteration("r", [PROMPT])
    fake.end("r", 0, state="FAILED", error=to_detail(WrongState("stale", reason="STALE_SNAPSHOT")))
    with pytest.raises(WrongState) as raised:
        client.wait(handle)
    assert raised.value.reason == "STALE_SNAPSHOT"


def test_a_cancelled_iteration_is_returned(client, fake):
    fake.instant = False
    handle = client.submit_iteration("r", [PROMPT])
    assert client.cancel(handle) == "cancelled"
    assert client.wait(handle).state == "cancelled"


def test_every_kind_of_event_is_read(client, fake):
    fake.emit(0, phase=pb.PhaseEvent(phase=types_pb2.PHASE_SUFFIX, span="suffix", ended=True, duration_s=2.0))
    fake.emit(0, progress=pb.ProgressEvent(samples_done=3, samples_total=8))
    fake.emit(0, note=pb.NoteEvent(level="warning", reason="UNSCORED", message="m"))
    fake.end("r", 0)
    events = client.watch("r")
    bodies = [next(events).body for _ in range(4)]
    events.close()
    assert bodies[0] == PhaseSpan("suffix", "suffix", True, 0.0, 2.0)
    assert bodies[1] == Progress(3, 8, 0, 0, None)
    assert bodies[2] == Note("warning", "UNSCORED", "m")
    assert isinstance(bodies[3], Iteration)


def test_a_watch_goes_on_after_the_server_was_away(client, fake):
    fake.instant = False
    handle = client.submit_iteration("r", [PROMPT])
    seen: list[int] = []
    first = threading.Event()

    def on_event(event) -> None:
        seen.append(event.sequence)
        first.set()

    results: list[Iteration] = []
    watcher = threading.Thread(target=lambda: results.append(client.wait(handle, on_event=on_event)))
    watcher.start()
    assert first.wait(5)
    fake.stop()
    fake.emit(0, note=pb.NoteEvent(level="info", reason="WHILE_AWAY", message=""))
    fake.start()
    fake.end("r", 0)
    watcher.join(10)
    assert results[0].state == "done"
    assert seen == [1, 2, 3]
    assert fake.streams == 2


def test_a_stream_that_runs_into_its_deadline_is_opened_again(client, fake):
    fake.emit(0, note=pb.NoteEvent(reason="FIRST"))
    events = client.watch("r", stream_s=0.3)
    assert next(events).sequence == 1
    timer = threading.Timer(1.0, lambda: fake.emit(0, note=pb.NoteEvent(reason="SECOND")))
    timer.start()
    assert next(events).body.reason == "SECOND"
    events.close()
    assert fake.streams >= 3


def test_a_watch_gives_up_on_a_server_that_stays_away(client, fake):
    fake.stop()
    with pytest.raises(Unavailable, match="not answered"):
        next(client.watch("r", give_up_s=0.5))


async def test_the_asyncio_client_does_the_same(fake):
    async with AsyncClient(fake.address) as client:
        await client.create_run("r")
        fake.instant = False
        handle = await client.submit_iteration("r", [PROMPT])
        seen: list[int] = []
        first = asyncio.Event()

        def on_event(event) -> None:
            seen.append(event.sequence)
            first.set()

        waiting = asyncio.create_task(client.wait(handle, on_event=on_event))
        async with asyncio.timeout(10):
            await first.wait()
            await asyncio.to_thread(fake.stop)
            fake.start()
            fake.end("r", 0)
            result = await waiting
        assert (result.state, seen, fake.streams) == ("done", [1, 2], 2)
        with pytest.raises(NotFound):
            await client.get_run("nope")
        with pytest.raises(BadInput):
            await client.submit_iteration("r", [])
