"""Processes killed in the middle of an iteration: it ends with the weights of an undisturbed run, to the last bit."""

from __future__ import annotations

import pytest
from runs import mixed, run_two, weights_of

pytestmark = pytest.mark.slow

CONFIGS = {
    "overlap": {"schedule": "overlap", "deterministic": True},
    "serial-two-updates": {"schedule": "serial", "deterministic": True, "optimizer": {"updates_per_iteration": 2}},
    # Two groups in a pass, one of which may be left out; three, and an update that ends inside the pass.
    "packs": {"schedule": "overlap", "deterministic": True, "suffix_micro_batch_samples": 8, "filter_zero_variance": True},
    "packs-two-updates": {"schedule": "serial", "deterministic": True, "suffix_micro_batch_samples": 12,
                          "optimizer": {"updates_per_iteration": 2}},
}
CASES = [
    ("rollout-0", "generate", "overlap"), ("trainer-0", "trainer_prefix", "overlap"),
    ("reference-0", "reference_prefix", "overlap"),
    ("reference-0", "score", "overlap"), ("trainer-0", "suffix", "serial-two-updates"), ("trainer-0", "gradient_norm", "overlap"),
    ("trainer-0", "write", "serial-two-updates"), ("rollout-0", "suffix", "overlap"), ("broker", "generate", "overlap"),
    ("broker", "write", "serial-two-updates"), ("keeper", "suffix", "overlap"), ("coordinator", "generate", "overlap"),
    ("coordinator", "suffix", "serial-two-updates"), ("coordinator", "write", "serial-two-updates"),
    ("trainer-0", "suffix", "packs"), ("reference-0", "score", "packs"), ("coordinator", "score", "packs"),
    ("trainer-0", "suffix", "packs-two-updates"), ("coordinator", "suffix", "packs-two-updates"),
]


@pytest.fixture(scope="module")
def undisturbed(mesh, prompts, image, tmp_path_factory):
    """Config -> (snapshot, weights)."""
    found = {}
    with mesh.client as client:
        for config in CONFIGS:
            run = run_two(mesh, client, CONFIGS[config], mixed(prompts, image))
            found[config] = client.get_run(run).snapshot, weights_of(client, run, tmp_path_factory.mktemp("undisturbed"))
    return found


@pytest.mark.parametrize(("name", "span", "config"), CASES, ids=["-".join(case) for case in CASES])
def test_a_kill_in_mid_iteration_changes_nothing(mesh, prompts, image, undisturbed, tmp_path, name, span, config):
    snapshot, expected = undisturbed[config]
    with mesh.client as client:
        run = run_two(mesh, client, CONFIGS[config], mixed(prompts, image), name, span)
        assert client.get_run(run).snapshot == snapshot
        found = weights_of(client, run, tmp_path / "weights")
    assert [key for key in expected if expected[key].tobytes() != found[key].tobytes()] == []


@pytest.mark.ranks
@pytest.mark.timeout(580)
@pytest.mark.parametrize("fields", [{"rollout_tensor_parallel": 2}, {"data_parallel": True}], ids=["together", "data parallel"])
def test_kills_at_two_ranks_change_nothing(another_mesh, prompts, image, tmp_path, fields):
    """Trainer and reference of two ranks each, over one replica of two or two that share groups out: the killed rank's role is
    lost as a whole."""
    sizes = {"train_tensor_parallel": 2, "reference_tensor_parallel": 2, **fields}
    with another_mesh(sizes=sizes) as wide, wide.client as client:
        found = []
        for name, span in (("", ""), ("trainer-1", "suffix"), ("reference-1", "score"), ("trainer-0", "write"),
                           ("rollout-0", "generate"), ("coordinator", "suffix")):
            run = run_two(wide, client, CONFIGS["overlap"], mixed(prompts, image), name, span)
            found.append(weights_of(client, run, tmp_path / (name + span)))
            assert [key for key in found[0] if found[0][key].tobytes() != found[-1][key].tobytes()] == [], (name, span)
