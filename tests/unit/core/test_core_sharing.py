"""The table of sharing policies: every policy and role, and what the configuration lets through."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.core.config import MeshSection
from rollplex.core.sharing import GPU_ROLES, POLICIES, environment, green_sm_count, without_mps_variables

PIPE = Path("/run/mesh/mps")
HIGH, LOW = {"CUDA_MPS_CLIENT_PRIORITY": "0"}, {"CUDA_MPS_CLIENT_PRIORITY": "1"}


def cap(percent: int) -> dict[str, str]:
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}


EXPECTED = {
    # policy: (daemon, capped stream, what trainer and reference get, what rollout gets)
    "time-slice": (False, False, {}, {}),
    "mps-default": (True, False, {}, {}),
    "mps-priority": (True, False, LOW, HIGH),
    "thread-cap": (True, False, LOW | cap(60), HIGH),
    "sm-affinity": (True, False, cap(60), cap(40)),
    "green-context": (True, True, LOW, HIGH),
}


def test_every_policy_and_role():
    assert set(POLICIES) == set(EXPECTED)
    for name, (daemon, stream, prefix_side, rollout) in EXPECTED.items():
        policy = POLICIES[name]
        assert (policy.daemon, policy.prefix_stream_capped) == (daemon, stream), name
        for role in GPU_ROLES:
            found = environment(policy, role, pipe_directory=PIPE, prefix_sm_percent=60)
            wanted = rollout if role == "rollout" else prefix_side
            assert found == {"CUDA_MPS_PIPE_DIRECTORY": str(PIPE)} | wanted, (name, role)


@pytest.mark.parametrize("role", ["coordinator", "broker", "reward", "mesh"])
def test_who_touches_no_gpu_is_told_nothing(role):
    for policy in POLICIES.values():
        assert environment(policy, role, pipe_directory=PIPE, prefix_sm_percent=60) == {}


def test_a_client_is_never_capped_twice():
    """A thread percentage beside a green context would take a share of a share."""
    for policy in POLICIES.values():
        assert not (policy.prefix_stream_capped and policy.prefix_clients_capped)


def test_what_the_shell_says_about_mps_is_not_inherited():
    assert without_mps_variables({"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/x", "PATH": "/bin",
                                  "CUDA_VISIBLE_DEVICES": "3"}) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(("total", "percent", "count"), [
    (132, 70, 96), (132, 50, 64), (132, 67, 88), (132, 1, 8), (132, 99, 128), (78, 20, 16), (8, 50, 8)])
def test_green_contexts_take_sms_by_eights(total, percent, count):
    assert green_sm_count(total, percent) == count


def test_no_policy_on_the_host():
    mesh = MeshSection(runtime_dir=Path("/run/mesh"), sharing="green-context")
    assert mesh.policy is None
    assert mesh.prefix_stream_percent is None


def test_the_default_on_a_gpu():
    mesh = MeshSection(runtime_dir=Path("/run/mesh"), devices="cuda")
    assert mesh.policy is POLICIES["mps-priority"]
    assert mesh.prefix_stream_percent is None
    assert MeshSection(runtime_dir=Path("/r"), devices="cuda", sharing="green-context").prefix_stream_percent == 70


@pytest.mark.parametrize(("sharing", "percent"), [("thread-cap", 50), ("sm-affinity", 50), ("green-context", 70)])
def test_a_policys_own_share_and_one_that_is_set(sharing, percent):
    assert MeshSection(runtime_dir=Path("/r"), sharing=sharing).prefix_percent == percent
    assert MeshSection(runtime_dir=Path("/r"), sharing=sharing, prefix_sm_percent=25).prefix_percent == 25


@pytest.mark.parametrize(("values", "words"), [
    ({"sharing": "mps"}, "one of time-slice, mps-default"), ({"devices": "gpu"}, "one of host, cuda"),
    ({"prefix_sm_percent": -1}, "from 1 to 99"), ({"prefix_sm_percent": 100}, "from 1 to 99")])
def test_wrong_values_say_what_is_allowed(values, words):
    with pytest.raises(ValueError, match=words):
        MeshSection(runtime_dir=Path("/run/mesh"), **values)
