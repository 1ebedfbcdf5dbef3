"""Processes killed in the middle of an iteration: it ends with the weights of an undisturbed run, to the last bit."""

from __future__ import annotations

import pytest
from runs import mixed, new_run, weights_of

from rollplex_client.results import PhaseSpan

pytestmark = pytest.mark.slow

CONFIGS = {
    "overlap": {"schedule": "overlap", "deterministic": True},
    "serial-two-updates": {"schedule": "serial", "deterministic": True, "optimizer": {"updates_per_iteration": 2}},
}
CASES = [
    ("rollout-0", "generate", "overlap"), ("trainer-0", "trainer_prefix", "overlap"),
    ("reference-0", "reference_prefix", "overlap"),
    ("reference-0", "score", "overlap"), ("trainer-0", "suffix", "serial-two-updates"), ("trainer-0", "gradient_norm", "overlap"),
    ("trainer-0", "write", "serial-two-updates"), ("rollout-0", "suffix", "overlap"), ("broker", "generate", "overlap"),
    ("broker", "write", "serial-two-updates"), ("keeper", "suffix", "overlap"), ("coordinator", "generate", "overlap"),
    ("coordinator", "suffix", "serial-two-updates"), ("coordinator", "write", "serial-two-updates"),
]


def run_two(mesh, client, config, prompts, image, name="", span=""):
    """Two iterations; `name` is killed where `span` begins for the second time in the run, and started again."""
    run, seen, killed = new_run(client, **CONFIGS[config]), [], []

    def kill(event):
        if isinstance(event.body, PhaseSpan) and event.body.span == span and not event.body.ended:
            seen.append(event.sequence)
            if len(seen) == 2 and not killed:
                killed.append(name)
                mesh.kill(name)
                mesh.start(name)

    for _ in range(2):
        done = client.wait(client.submit_iteration(run, mixed(prompts, image)), on_event=kill)
        assert done.state == "done"
    assert killed == ([name] if name else [])
    return run


@pytest.fixture(scope="module")
def undisturbed(mesh, prompts, image, tmp_path_factory):
    """Config -> (snapshot, weights)."""
    found = {}
    with mesh.client as client:
        for config in CONFIGS:
            run = run_two(mesh, client, config, prompts, image)
            found[config] = client.get_run(run).snapshot, weights_of(client, run, tmp_path_factory.mktemp("undisturbed"))
    return found


@pytest.mark.parametrize(("name", "span", "config"), CASES, ids=[f"{name}-{span}" for name, span, _ in CASES])
def test_a_kill_in_mid_iteration_changes_nothing(mesh, prompts, image, undisturbed, tmp_path, name, span, config):
    snapshot, expected = undisturbed[config]
    with mesh.client as client:
        run = run_two(mesh, client, config, prompts, image, name, span)
        assert client.get_run(run).snapshot == snapshot
        found = weights_of(client, run, tmp_path / "weights")
    assert [key for key in expected if expected[key].tobytes() != found[key].tobytes()] == []
