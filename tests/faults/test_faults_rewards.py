"""A reward's process dies while an iteration waits for it."""

from __future__ import annotations

import pytest
from faulty_mesh import PROMPTS, until

from rollplex_client.results import Note

pytestmark = pytest.mark.slow


def hold_iteration(mesh, client, run):
    """Submits an iteration and returns once its samples are with the reward, which does not answer."""
    handle = client.submit_iteration(run, PROMPTS[:2])
    until(lambda: mesh.reward.asked, "the reward is asked")
    return handle


def test_it_comes_back_and_every_sample_is_scored(mesh, client):
    run = mesh.new_run(client)
    with mesh.reward.held():
        handle = hold_iteration(mesh, client, run)
        mesh.reward.kill()
    mesh.reward.start()
    done = client.wait(handle)
    assert done.metrics["reward/unscored_count"] == 0.0
    for sample in client.list_samples(run, 0):
        assert sample.parts["ids"] == pytest.approx(sum(sample.token_ids) % 7 / 7)
    assert client.get_run(run).snapshot == 1


def test_it_never_comes_back_and_the_iteration_ends_without_its_scores(mesh, client):
    run, notes = mesh.new_run(client), []
    client.register_reward("ids", mesh.reward.address, timeout_s=1.0, retries=0)
    try:
        with mesh.reward.held():
            handle = hold_iteration(mesh, client, run)
            mesh.reward.kill()
        done = client.wait(handle, on_event=lambda event: notes.append(event.body) if isinstance(event.body, Note) else None)
        assert (done.state, done.metrics["reward/unscored_count"]) == ("done", 4.0)
        assert {"UNSCORED", "NOTHING_SCORED"} <= {note.reason for note in notes}
        assert all(sample.reward is None for sample in client.list_samples(run, 0))
        assert client.get_run(run).snapshot == 0
    finally:
        mesh.reward.start()
        client.register_reward("ids", mesh.reward.address, timeout_s=5.0, retries=6)
    assert client.wait(client.submit_iteration(run, PROMPTS[2:4])).metrics["reward/unscored_count"] == 0.0
    assert client.get_run(run).snapshot == 1
