"""Full disks: under the journal, and under a durable checkpoint. A process may not let a file grow; to it that is a full disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from faulty_mesh import PROMPTS, iteration_of, until

from rollplex.core.errors import Unavailable
from rollplex_client.results import Note

pytestmark = pytest.mark.slow

LITTLE_BYTES = 4096


def events_of(client, run, last):
    """Up to that number, from the first; the numbers have no gap."""
    found = []
    for event in client.watch(run):
        found.append(event)
        if event.sequence >= last:
            break
    assert [event.sequence for event in found] == list(range(1, last + 1))
    return found


def test_an_iteration_that_finds_no_room_is_refused_and_taken_once_there_is(mesh, client):
    run = mesh.new_run(client)
    mesh.limit_files("coordinator", LITTLE_BYTES)
    try:
        with pytest.raises(Unavailable, match="Make room") as refused:
            client.submit_iteration(run, PROMPTS[:2], request_id="one")
        assert refused.value.reason == "JOURNAL_FULL"
        assert client.get_run(run).next_iteration == 0
    finally:
        mesh.limit_files("coordinator", None)
    handle = client.submit_iteration(run, PROMPTS[:2], request_id="one")
    assert (handle.iteration, client.wait(handle).state) == (0, "done")


def test_room_that_comes_back_in_time_is_waited_for(mesh, client):
    """The disk is full while samples are scored, and for less than `journal_full_wait_s`."""
    run = mesh.new_run(client)
    with mesh.reward.held():
        handle = client.submit_iteration(run, PROMPTS[:2])
        until(lambda: mesh.reward.asked, "the reward is asked")
        mesh.limit_files("coordinator", LITTLE_BYTES)
        mesh.reward.release()
        threading.Timer(0.4, mesh.limit_files, ("coordinator", None)).start()
        done = client.wait(handle)
    assert done.state == "done"
    events_of(client, run, client.get_run(run).last_sequence)


def test_an_iteration_that_runs_out_of_room_says_so_and_the_next_one_works(mesh, client):
    """Nothing that was acknowledged is lost, even if the coordinator is killed while the disk is full."""
    run = mesh.new_run(client)
    assert client.wait(client.submit_iteration(run, PROMPTS[:2])).state == "done"
    with mesh.reward.held():
        handle = client.submit_iteration(run, PROMPTS[2:4], request_id="second")
        until(lambda: mesh.reward.asked, "the reward is asked")
        acknowledged = client.get_run(run)
        mesh.limit_files("coordinator", LITTLE_BYTES)
        mesh.reward.release()
        until(lambda: "cannot grow" in mesh.log("coordinator"), "the journal is full")
        mesh.kill("coordinator")
    mesh.start("coordinator")
    found = client.get_run(run)
    assert found.next_iteration == 2 and found.snapshot >= 1
    assert found.last_sequence >= acknowledged.last_sequence
    assert iteration_of(client, run, 0).state == "done"
    assert len(client.list_samples(run, 0)) == 4
    again = client.submit_iteration(run, PROMPTS[2:4], request_id="second")
    assert again.iteration == handle.iteration
    until(lambda: iteration_of(client, run, 1).ended, "the interrupted iteration is settled")
    assert iteration_of(client, run, 1).state == "done"
    events_of(client, run, client.get_run(run).last_sequence)
    assert client.wait(client.submit_iteration(run, PROMPTS[4:])).state == "done"


def test_a_checkpoint_without_room_is_a_warning_and_nothing_half_is_there(mesh, client):
    run = mesh.new_run(client, checkpoint_every=1, checkpoint_keep=5)

    def iterate():
        assert client.wait(client.submit_iteration(run, PROMPTS[:2])).state == "done"
        try:
            return client.durable_checkpoint(run)
        finally:
            found.update(path.name for path in folder.iterdir())

    folder, found = mesh.runtime_dir / "checkpoints" / run, set()
    whole = iterate()
    assert whole.next_iteration == 1
    mesh.limit_files("trainer-0", LITTLE_BYTES)
    try:
        assert iterate() == whole
        assert found == {Path(whole.path).name}
    finally:
        mesh.limit_files("trainer-0", None)
    last = iterate()
    assert last.next_iteration == 3
    assert found == {Path(whole.path).name, Path(last.path).name}
    notes = [event.body for event in events_of(client, run, client.get_run(run).last_sequence) if isinstance(event.body, Note)]
    warned = [note for note in notes if note.level == "warning"]
    assert [("the run goes on" in note.message, note.reason) for note in warned] == [(True, "CHECKPOINT_DISK_FULL")], notes
    assert client.get_run(run).snapshot == 3
