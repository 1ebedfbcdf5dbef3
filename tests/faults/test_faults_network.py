"""Between the coordinator and an engine, and the coordinator and the broker: calls repeated, late, held up, cut off.

What comes of it equals what comes of an undisturbed coordinator on the same engines, to the bit.
"""

from __future__ import annotations

import threading

import pytest
from faulty_mesh import PROMPTS, until
from runs import weights_of

pytestmark = pytest.mark.slow

COPYABLE = ("BeginUpdate", "PublishSnapshot", "EnterPhase", "RegisterSnapshot", "ReleaseLease", "GetSnapshot")
"""Calls to the broker whose copy may come at any time: of what creates or grants, only the caller knows the ticket."""


@pytest.fixture
def proxies(mesh):
    """By service, with fresh counts; afterwards everything passes again."""
    for proxy in mesh.proxies.values():
        proxy.repeated.clear()
        proxy.refused.clear()
    yield mesh.proxies
    for proxy in mesh.proxies.values():
        proxy.behave()


def trained(mesh, client, directory, iterations=2):
    run = mesh.new_run(client)
    for index in range(iterations):
        assert client.wait(client.submit_iteration(run, PROMPTS[2 * index:2 * index + 2])).state == "done"
    return {name: weight.tobytes() for name, weight in weights_of(client, run, directory).items()}


@pytest.fixture(scope="module")
def undisturbed(mesh, tmp_path_factory):
    with mesh.client as client:
        start = trained(mesh, client, tmp_path_factory.mktemp("start"), iterations=0)
        found = trained(mesh, client, tmp_path_factory.mktemp("plain"))
    assert sum(found[name] != start[name] for name in found) > len(found) // 3, "nothing was trained"
    return found


def test_every_command_twice_the_second_one_late_and_out_of_order(mesh, client, proxies, undisturbed, tmp_path):
    for seed, name in enumerate(("trainer-0", "rollout-0", "reference-0")):
        proxies[name].behave(lambda method: True, seed=seed)
    assert trained(mesh, client, tmp_path / "twice") == undisturbed
    for name, method in (("trainer-0", "StartApplyUpdate"), ("trainer-0", "StartTrainSuffix"), ("rollout-0", "StartGenerate"),
                         ("reference-0", "StartScoreSuffix")):
        assert proxies[name].repeated[method] >= 2, (name, method)


def test_every_answer_of_engines_and_broker_lost_once(mesh, client, proxies, undisturbed, tmp_path):
    """The call had its effect, its answer did not arrive, and it is repeated: what a client does after a broken connection."""
    for proxy in proxies.values():
        proxy.behave(lambda method: method != "CreateSlab", late=False)
    assert trained(mesh, client, tmp_path / "lost") == undisturbed
    for method in ("BeginUpdate", "PublishSnapshot", "EnterPhase", "RegisterSnapshot"):
        assert proxies["broker"].repeated[method] >= 2, method
    assert proxies["trainer-0"].repeated["StartApplyUpdate"] >= 2


def test_late_copies_at_the_broker_change_nothing(mesh, client, proxies, undisturbed, tmp_path):
    """A late BeginUpdate makes another epoch while the trainer writes under the first, and the update is rolled forward."""
    proxies["broker"].behave(lambda method: method in COPYABLE, seed=3)
    assert trained(mesh, client, tmp_path / "late") == undisturbed
    assert proxies["broker"].repeated["BeginUpdate"] >= 2


def test_pauses_and_cuts_are_waited_out(mesh, client, proxies, undisturbed, tmp_path):
    run = mesh.new_run(client)
    with mesh.reward.held():
        handle = client.submit_iteration(run, PROMPTS[:2])
        until(lambda: mesh.reward.asked, "the reward is asked")
        for proxy in proxies.values():
            proxy.pause()
        mesh.reward.release()
        threading.Event().wait(1.0)
        for name in ("trainer-0", "reference-0"):
            proxies[name].cut()
        for proxy in proxies.values():
            proxy.resume()
        assert client.wait(handle).state == "done"
    assert client.wait(client.submit_iteration(run, PROMPTS[2:4])).state == "done"
    found = {name: weight.tobytes() for name, weight in weights_of(client, run, tmp_path / "paused").items()}
    assert found == undisturbed
