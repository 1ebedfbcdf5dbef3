import argparse
import dataclasses

import pytest

from rollplex.core.config import RunConfig
from rollplex.core.errors import BadInput
from rollplex.core.ids import sample_seed
from rollplex.core.response_lengths import LengthDistribution
from rollplex.core.sharing import POLICIES
from rollplex.core.strict import parse
from rollplex.core.topology import Topology
from rollplex_client.bench.arm_settings import arm_settings, arm_tables, gpu_plan, kv_cache_gib
from rollplex_client.bench.arms import Arm
from rollplex_client.bench.job import check_numbers, make_job
from rollplex_client.bench.reward import count_reward
from rollplex_client.cli.settings import parse_settings

HBM = 141 << 30
OVERLAP = Arm("overlap", "mps-default")


def tables_of(job, arm, folder, hbm=HBM, **given):
    return arm_tables(job, [arm], arm, folder, hbm, **given)


def test_lengths_are_those_of_the_samples_seeds(job):
    """A prompt's ordinal counts on: iteration 2 begins at ordinal 8."""
    lengths = LengthDistribution(225, 1024)
    assert job.lengths(2)[3][5] == lengths.length(sample_seed(0, 2, 8 + 3, 5))
    assert job.lengths(0) != job.lengths(1)
    assert [len(row) for row in job.lengths(0)] == [8] * 4


def test_rewards_tell_the_samples_of_a_group_apart(job):
    for row in job.lengths(0):
        rewards = count_reward([None] * 8, [[0] * length for length in row])
        assert len(set(rewards)) == len(set(row)) > 1
        assert all(0 <= reward < 1 for reward in rewards)


def test_run_config_is_one_that_the_coordinator_takes(job):
    config = parse(RunConfig, job.run_config("overlap"), "run")
    assert config.sampling.length_distribution == "lognormal:225:1024"
    assert (config.schedule, config.loss.kl_coef, config.sampling.samples_per_group) == ("overlap", 0.0, 8)


def test_kv_holds_every_sample_at_once(job):
    tokens = max(sum(4096 + sum(row) for row in job.lengths(iteration)) for iteration in range(3))
    needed = tokens * 2 * 36 * 2 * 128 * 2 / 2**30
    assert needed < kv_cache_gib(job, OVERLAP) < 1.3 * needed


def test_a_gpu_mesh_gets_devices_policy_and_sizes(job, tmp_path):
    tables = tables_of(job, OVERLAP, tmp_path)
    mesh = parse_settings(tables).mesh
    assert (mesh.devices, mesh.sharing, mesh.topology) == ("cuda", "mps-default", Topology(device_kind="cuda"))
    assert tables["rollout"]["engine"] == "vllm"
    assert tables["rollout"]["vllm"]["max_model_len"] == 5120
    assert tables["model"] == {"checkpoint": str(job.checkpoint), "dtype": "bfloat16", "max_prompt_tokens": 4096}
    assert tables["run"]["saved_activations"] in ("keep", "recompute", "offload", "from_inputs")
    assert tables_of(job, Arm("disaggregated", "time-slice", own_replicas=1), tmp_path)["mesh"]["own_replicas"] == 1


def test_degrees_divide_keys_values_and_rows(job, tmp_path):
    """Of 3B, with its two kv heads: replicas share groups, ranks of a replica share heads."""
    one, two, wide = (kv_cache_gib(job, arm) for arm in (
        OVERLAP, Arm("overlap", "mps-default", 2, 1), Arm("overlap", "mps-default", 2, 2)))
    assert two == pytest.approx(one / 2, rel=0.15)
    assert wide == pytest.approx(one / 2, rel=0.02)
    tables = tables_of(job, Arm("overlap", "mps-default", 2, 1), tmp_path, host_bytes=200 << 30)
    mesh = parse_settings(tables).mesh
    assert (mesh.ranks("trainer"), mesh.ranks("reference"), mesh.ranks("rollout")) == (2, 2, 2)
    assert (tables["rollout"]["max_rows"], tables["broker"]) == (16, {"host_limit_bytes": 200 << 30})


def test_all_arms_place_classes_where_the_tightest_has_room(job, tmp_path):
    """A GPU that trains alone holds twice the gradients of one of two; at 42 GiB its gradients have no room."""
    arms = [Arm("disaggregated", "time-slice", own_replicas=1), Arm("overlap", "mps-default", 2, 1)]

    def gradients(of: list[Arm]) -> list[str]:
        return [arm_tables(job, of or [arm], arm, tmp_path, 42 << 30, 200 << 30)["trainer"]["gradients"] for arm in arms]

    assert gradients([]) == ["host", "hbm"]
    assert gradients(arms) == ["host", "host"]


def test_groups_that_go_together_are_planned_for(job, tmp_path):
    together = dataclasses.replace(job, micro_batch_samples=16)
    assert tables_of(job, OVERLAP, tmp_path)["run"]["suffix_micro_batch_samples"] == 0
    assert tables_of(together, OVERLAP, tmp_path)["run"]["suffix_micro_batch_samples"] == 16
    alone, both = (next(column.hbm for column in gpu_plan(each, OVERLAP, HBM).columns if "suffix_activations" in column.hbm)
                   for each in (job, together))
    assert both["suffix_activations"] > 1.8 * alone["suffix_activations"]


def test_a_budget_is_kept_and_planned_by(job, tmp_path):
    def settings(hbm_gib):
        arguments = argparse.Namespace(hbm_gib=hbm_gib, host_gib=200.0, config=None, overrides=[])
        return arm_settings(job, [OVERLAP], OVERLAP, tmp_path, arguments, HBM)

    whole, bounded = settings(None), settings(40.0)
    assert (whole.mesh.hbm_budget_gib, bounded.mesh.hbm_budget_gib, bounded.mesh.hbm_runtime_gib) == (0, 40, 8)
    assert whole.sections["broker"].host_limit_bytes == 200 << 30
    assert (whole.sections["trainer"].gradients, bounded.sections["trainer"].gradients) == ("hbm", "host")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_mesh_of_every_policy_reads_as_a_configuration(job, tmp_path, policy):
    mesh = parse_settings(tables_of(job, Arm("overlap", policy), tmp_path)).mesh
    assert (mesh.devices, mesh.sharing, mesh.policy) == ("cuda", policy, POLICIES[policy])
    assert mesh.topology.device_name(0) == "cuda:0"


def test_arms_differ_in_nothing_but_schedule_and_policy(job, tmp_path):
    arms = Arm("serial", "time-slice"), Arm("overlap", "mps-default")
    serial, overlap = (tables_of(job, arm, tmp_path) for arm in arms)
    for tables in (serial, overlap):
        tables["run"].pop("schedule")
        tables["mesh"].pop("sharing")
    assert serial == overlap


def test_the_plan_counts_the_whole_job(job):
    given = gpu_plan(job, OVERLAP, HBM).given
    assert (given.work.groups, given.work.samples, given.work.prompt_tokens, given.reference) == (4, 8, 4096, False)
    longest = max(sum(row) for iteration in range(3) for row in job.lengths(iteration))
    assert given.work.response_tokens * 8 >= longest > (given.work.response_tokens - 1) * 8


def test_a_cpu_mesh_reads_as_a_configuration(job, tmp_path):
    from dataclasses import replace

    settings = parse_settings(tables_of(replace(job, device="cpu"), Arm("serial", "time-slice"), tmp_path))
    assert settings.run.schedule == "serial"
    assert settings.sections["rollout"].engine == "torch"
    assert settings.sections["coordinator"].media.max_frames == 16
    assert settings.sections["coordinator"].builtin_reward == ""


def arguments(**changed) -> argparse.Namespace:
    return argparse.Namespace(**{"device": "cpu", "prompt_tokens": 4096, "groups": 4, "samples": 8, "iterations": 3,
                                 "response_tokens": 225.0, "max_response_tokens": 1024, "kl_coef": 0.0, "seed": 0,
                                 "micro_batch_samples": 0} | changed)


@pytest.mark.parametrize("changed", [{"samples": 1}, {"iterations": 1}, {"groups": 0}, {"response_tokens": 2000.0},
                                     {"response_tokens": 0.0}, {"max_response_tokens": 0}, {"micro_batch_samples": -1}])
def test_numbers_that_make_no_job_are_refused(changed):
    with pytest.raises(BadInput, match="--" + next(iter(changed)).replace("_", "-")):
        check_numbers(arguments(**changed))


def test_a_job_is_made_of_options_and_what_was_built(job):
    check_numbers(arguments())
    built = {"checkpoint": str(job.checkpoint), "media_root": str(job.media_root), "workload": job.workload}
    assert make_job(arguments(device="cuda"), built) == job


def test_the_result_says_what_the_job_was(job):
    plain = job.plain()
    assert plain["response_tokens"] == [sum(map(sum, job.lengths(iteration))) for iteration in range(3)]
    assert plain["longest_response"] <= 1024
    # Forward four times over (rollout once, the trainer thrice): 16k prompt tokens through 2.8 G parameters and 7k of
    # responses through 3.1 G, 62k patches through a tower of 0.63 G; attention adds a sixth of the first.
    by_hand = 4 * 2 * (16384 * 2.8e9 * 7 / 6 + sum(map(sum, job.lengths(0))) * 3.1e9 + 62208 * 0.63e9)
    assert by_hand == pytest.approx(plain["step_flops"][0], rel=0.05)
