import pytest

from rollplex.core.errors import BadInput
from rollplex.core.sharing import POLICIES
from rollplex_client.bench.arms import Arm, by_mesh, check_gpus, parse_arms


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


def test_degrees_are_an_arms_own_or_everybodys():
    found = parse_arms("serial,overlap@mps-default:2x2,disaggregated", "cuda", train_tp=2, gpus=2)
    assert found == [Arm("serial", "time-slice", 2, 1), Arm("overlap", "mps-default", 2, 2),
                     Arm("disaggregated", "time-slice", 1, 1, 1)]
    assert [arm.gpus for arm in found] == [2, 2, 2]
    assert list(map(str, found)) == ["serial@time-slice:2x1", "overlap@mps-default:2x2", "disaggregated@time-slice"]
    assert parse_arms("disaggregated", "cuda") == [Arm("disaggregated", "time-slice", 1, 1, 1)]


def test_disaggregated_fills_the_gpus_that_do_not_train():
    eight, = parse_arms("disaggregated", "cuda", train_tp=8, rollout_tp=4, gpus=8)
    assert (eight.train_tp, eight.rollout_tp, eight.own_replicas, eight.gpus) == (4, 4, 1, 8)
    narrow, = parse_arms("disaggregated:4x1", "cuda", gpus=8)
    assert (narrow.own_replicas, narrow.gpus) == (4, 8)


def test_an_arm_may_be_data_parallel():
    from rollplex.core.ids import check_run_name

    together, shared = parse_arms("overlap:2x1,overlap:2x1dp", "cuda")
    assert (together.data_parallel, shared.data_parallel) == (False, True)
    assert str(shared) == "overlap@mps-priority:2x1dp" and check_run_name(shared.run_name)
    assert [len(alike) for alike in by_mesh([together, shared])] == [1, 1], "another mesh"


def test_arms_of_other_numbers_of_gpus_are_refused():
    with pytest.raises(BadInput, match=r"serial@time-slice takes 1 GPUs and not 2"):
        parse_arms("overlap:2x1,serial:1x1", "cuda", gpus=2)
    with pytest.raises(BadInput, match="TP_train must be a positive multiple"):
        parse_arms("overlap:2x4", "cuda")


@pytest.mark.parametrize(("text", "device", "reason"), [
    ("", "cuda", "BAD_ARM"), (",", "cuda", "BAD_ARM"), ("parallel", "cuda", "BAD_ARM"), ("overlap@", "cuda", "BAD_ARM"),
    ("overlap@mps", "cuda", "BAD_ARM"), ("overlap:2", "cuda", "BAD_ARM"), ("serial:2x1,serial:2x1", "cuda", "BAD_ARM"),
    ("overlap:2x2dp", "cuda", "BAD_ARM"),
    ("serial,serial@time-slice", "cuda", "BAD_ARM"),
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


def test_neighbours_that_differ_in_their_schedule_share_a_mesh():
    arms = parse_arms("serial@mps-priority,overlap@mps-priority,overlap@mps-default,serial,"
                      "overlap:2x1,overlap:2x2", "cuda")
    assert [[str(arm) for arm in alike] for alike in by_mesh(arms)] == [
        ["serial@mps-priority", "overlap@mps-priority"], ["overlap@mps-default"], ["serial@time-slice"],
        ["overlap@mps-priority:2x1"], ["overlap@mps-priority:2x2"]]
    apart = parse_arms("disaggregated,serial:2x1", "cuda", gpus=2)
    assert [len(alike) for alike in by_mesh(apart)] == [1, 1], "a replica of its own is another mesh"
