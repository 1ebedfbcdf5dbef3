import pytest

from rollplex.core.errors import BadInput
from rollplex.core.sharing import POLICIES
from rollplex_client.bench.arms import Arm, check_gpus, parse_arms


def test_arms_are_schedules_and_policies():
    assert parse_arms("serial, overlap@mps-default,overlap@green-context", "cuda") == [
        Arm("serial", "time-slice"), Arm("overlap", "mps-default"), Arm("overlap", "green-context")]
    assert parse_arms("serial,overlap", "cpu") == [Arm("serial", "time-slice"), Arm("overlap", "time-slice")]
    assert parse_arms("overlap", "cuda") == [Arm("overlap", "mps-priority")]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_a_name_that_a_run_may_have(policy):
    from rollplex.core.ids import check_run_name

    arm, = parse_arms(f"overlap@{policy}", "cuda")
    assert str(arm) == f"overlap@{policy}"
    assert check_run_name(arm.run_name)


@pytest.mark.parametrize(("text", "device", "reason"), [
    ("", "cuda", "BAD_ARM"), (",", "cuda", "BAD_ARM"), ("parallel", "cuda", "BAD_ARM"), ("overlap@", "cuda", "BAD_ARM"),
    ("overlap@mps", "cuda", "BAD_ARM"), ("serial,serial@time-slice", "cuda", "BAD_ARM"),
    ("overlap@mps-default", "cpu", "POLICY_NEEDS_GPU")])
def test_what_is_no_arm_is_refused(text, device, reason):
    with pytest.raises(BadInput) as caught:
        parse_arms(text, device)
    assert caught.value.reason == reason


def test_disaggregated_needs_two_gpus():
    arms = parse_arms("serial,disaggregated", "cuda")
    check_gpus(arms, "cuda", 2)
    check_gpus(arms[:1], "cuda", 1)
    with pytest.raises(BadInput, match="disaggregated@time-slice"):
        check_gpus(arms, "cuda", 1)
