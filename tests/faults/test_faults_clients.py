"""Clients that vanish, and clients that come at once."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from faulty_mesh import PROMPTS, iteration_of, until

from rollplex.core.errors import WrongState

pytestmark = pytest.mark.slow

WATCHER = """
import sys
from rollplex_client import Client, Prompt
address, run, request = sys.argv[1:]
prompts = [Prompt.text(f"Which way, number {index}?", ground_truth="A", problem_type="multiple choice") for index in range(2)]
with Client(address) as client:
    handle = client.submit_iteration(run, prompts, request_id=request)
    for event in client.watch(run, handle.after_sequence):
        print(event.sequence, flush=True)
"""


def test_a_client_that_vanishes_finds_its_iteration_and_the_events_it_has_not_seen(mesh, client):
    run, seen = mesh.new_run(client), []
    with mesh.reward.held():
        watcher = subprocess.Popen([sys.executable, "-c", WATCHER, mesh.mesh.address("coordinator"), run, "mine"],
                                   stdout=subprocess.PIPE, text=True)
        try:
            seen += [int(watcher.stdout.readline()) for _ in range(3)]
            until(lambda: mesh.reward.asked, "the reward is asked")
        finally:
            watcher.kill()
            watcher.wait(30)
        assert not iteration_of(client, run, 0).ended
    handle = client.submit_iteration(run, PROMPTS[:2], request_id="mine")
    assert handle.iteration == 0
    for event in client.watch(run, seen[-1]):
        seen.append(event.sequence)
        if getattr(event.body, "ended", False) is True and hasattr(event.body, "metrics"):
            break
    assert seen == list(range(1, len(seen) + 1))
    assert iteration_of(client, run, 0).state == "done"
    assert client.get_run(run).next_iteration == 1


def at_once(calls):
    """Runs them on threads of their own; what each returned or raised."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - compared by the test
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def test_two_clients_with_one_request_get_one_iteration_and_others_are_queued(mesh, client):
    run = mesh.new_run(client)
    with mesh.client as other:
        handles = at_once([lambda: client.submit_iteration(run, PROMPTS[:2], request_id="same"),
                           lambda: other.submit_iteration(run, PROMPTS[:2], request_id="same"),
                           lambda: other.submit_iteration(run, PROMPTS[2:4], request_id="another")])
        assert handles[0].iteration == handles[1].iteration
        assert {handle.iteration for handle in handles} == {0, 1}
        ended = at_once([lambda: client.wait(handles[0]), lambda: other.wait(handles[1]), lambda: other.wait(handles[2])])
    assert [item.state for item in ended] == ["done"] * 3
    assert client.get_run(run).snapshot == 2


def test_a_second_run_is_refused_while_the_first_one_works_and_opens_afterwards(mesh, client):
    run = mesh.new_run(client)
    with mesh.client as other:
        with mesh.reward.held():
            handle = client.submit_iteration(run, PROMPTS[:2])
            until(lambda: mesh.reward.asked, "the reward is asked")
            with pytest.raises(WrongState, match="busy with") as refused:
                mesh.new_run(other)
            assert refused.value.reason == "RUN_BUSY"
        assert client.wait(handle).state == "done"
        second = mesh.new_run(other)
        assert other.wait(other.submit_iteration(second, PROMPTS[:2])).state == "done"
        with pytest.raises(WrongState, match="closed"):
            client.submit_iteration(run, PROMPTS[:2])


def test_two_clients_that_open_two_runs_at_once_leave_one_open(mesh, client):
    with mesh.client as other:
        first, second = at_once([lambda: mesh.new_run(client), lambda: mesh.new_run(other)])
        assert first != second
        states = {client.get_run(name).state for name in (first, second)}
        assert states == {"active", "closed"}
        open_run = client.mesh().open_run
        assert client.wait(client.submit_iteration(open_run, PROMPTS[:2])).state == "done"
