"""What every rollout engine promises, over its socket."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_rig import ledger_bytes
from rollout_rig import SAMPLING, bits_of, generate, start, teacher_forced, tokens_of

from rollplex.core import work
from rollplex.core.errors import Aborted, BadInput, DataLoss, DeadlineExceeded, WrongState
from rollplex.core.ids import sample_seed


@pytest.mark.parametrize("kind", ["text", "image", "video", "mixed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_arrive_with_the_trainers_logprobs(mesh, bound, tolerance, kind, temperature):
    groups = [mesh.prompts.group(kind, index, samples=4) for index in range(2)]
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    outcome = generate(mesh, bound, groups, sampling)
    assert set(outcome.samples) == {(group, sample) for group in range(2) for sample in range(4)}
    forbidden = set(mesh.oracle.config.forbidden_token_ids)
    for group in groups:
        samples = [outcome.samples[group.group_index, index] for index in range(4)]
        for sample, expected in zip(samples, teacher_forced(mesh, group, samples, temperature)):
            np.testing.assert_allclose(np.array(sample.logprobs), expected, atol=tolerance)
            assert not forbidden & set(sample.token_ids)
    result = outcome.value("generate", work.GenerateResult)
    assert result.prompt_hashes == tuple(group.prompt_hash for group in groups)
    assert result.prompt_tokens == sum(len(group.token_ids) for group in groups)
    assert result.response_tokens == sum(len(sample.token_ids) for sample in outcome.samples.values())
    assert result.prefill_s > 0
    assert result.decode_s > 0
    # At most a step a token, each of them with a row; a step in which every sample started is prefill's.
    assert 0 < result.decode_steps <= 2 * SAMPLING.max_response_tokens
    assert result.decode_steps <= result.decode_rows <= 8 * result.decode_steps


def test_finished_samples_are_streamed_before_the_result(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=4) for index in range(6)]
    outcome = generate(mesh, bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=120))
    assert len(outcome.batches) > 6
    assert outcome.kinds[-1] == "result"
    assert "progress" in outcome.kinds
    assert outcome.kinds.index("samples") < outcome.kinds.index("progress")
    assert len(outcome.samples) == sum(map(len, outcome.batches)) == 24  # each exactly once


def test_responses_end_at_an_end_token_or_at_the_limit(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(3)]
    outcome = generate(mesh, bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=100))
    ends = set(mesh.oracle.config.eos_token_ids)
    reasons = set()
    for sample in outcome.samples.values():
        reasons.add(sample.finish_reason)
        assert len(sample.token_ids) == len(sample.logprobs)
        assert not ends & set(sample.token_ids[:-1])
        if sample.finish_reason == "stop":
            assert sample.token_ids[-1] in ends
        else:
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == 100
            assert sample.token_ids[-1] not in ends
    assert reasons == {"stop", "length"}


def test_prescribed_lengths_are_those_of_the_samples_seeds(mesh, bound):
    """Whatever the tokens are: some of these responses go on after an end token."""
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(3)]
    sampling = dataclasses.replace(SAMPLING, max_response_tokens=100, length_distribution="lognormal:40:100")
    outcome = generate(mesh, bound, groups, sampling, iteration=2)
    expected = {(group.group_index, index): sampling.lengths.length(sample_seed(5, 2, group.prompt_ordinal, index))
                for group in groups for index in range(8)}
    assert {key: len(sample.token_ids) for key, sample in outcome.samples.items()} == expected
    assert {sample.finish_reason for sample in outcome.samples.values()} == {"length"}
    ends = set(mesh.oracle.config.eos_token_ids)
    assert any(ends & set(sample.token_ids[:-1]) for sample in outcome.samples.values())
    samples = [outcome.samples[0, index] for index in range(8)]
    for sample, logp in zip(samples, teacher_forced(mesh, groups[0], samples, 1.0)):
        np.testing.assert_allclose(np.array(sample.logprobs), logp, atol=1e-4)


def test_seeds_decide_the_samples(mesh, bound):
    groups = [mesh.prompts.group("video", 0), mesh.prompts.group("text", 1)]
    first = tokens_of(generate(mesh, bound, groups))
    assert tokens_of(generate(mesh, bound, groups)) == first
    assert len({tuple(tokens) for tokens in first.values()}) == 8
    for changed in ({"iteration": 1}, {"sampling": dataclasses.replace(SAMPLING, seed=6)}):
        assert tokens_of(generate(mesh, bound, groups, **changed)) != first
    moved = [dataclasses.replace(group, prompt_ordinal=group.prompt_ordinal + 9) for group in groups]
    assert tokens_of(generate(mesh, bound, moved)) != first


def test_a_longer_limit_continues_the_same_samples(mesh, bound):
    group = mesh.prompts.group("text")
    short = tokens_of(generate(mesh, bound, [group], dataclasses.replace(SAMPLING, max_response_tokens=8)))
    long = tokens_of(generate(mesh, bound, [group]))
    assert all(long[key][:8] == tokens for key, tokens in short.items())


def test_deterministic_groups_do_not_depend_on_their_company(mesh, bound):
    groups = [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "video", "image", "mixed"])]
    sampling = dataclasses.replace(SAMPLING, deterministic=True, max_response_tokens=60)
    together = bits_of(generate(mesh, bound, groups, sampling))
    backwards = bits_of(generate(mesh, bound, groups[::-1], sampling))
    alone = {}
    for group in groups:
        alone |= bits_of(generate(mesh, bound, [group], sampling))
    assert together == backwards == alone


def test_batched_and_deterministic_samples_have_the_same_tokens(mesh, bound, engine_name):
    if engine_name.startswith("vllm"):
        pytest.skip("what vLLM computes depends in its last bits on a batch's company; only `torch` promises tokens across modes")
    groups = [mesh.prompts.group(kind, index) for index, kind in enumerate(["text", "video", "image", "mixed", "text"])]
    sampling = dataclasses.replace(SAMPLING, max_response_tokens=80)
    batched = tokens_of(generate(mesh, bound, groups, sampling))
    assert batched == tokens_of(generate(mesh, bound, groups, dataclasses.replace(sampling, deterministic=True)))


def test_greedy_repeats_and_reports_temperature_one(mesh, bound, tolerance):
    group = mesh.prompts.group("image", samples=2)
    outcome = generate(mesh, bound, [group], dataclasses.replace(SAMPLING, greedy=True, temperature=0.0))
    samples = [outcome.samples[0, index] for index in range(2)]
    assert samples[0].token_ids == samples[1].token_ids
    np.testing.assert_allclose(np.array(samples[0].logprobs), teacher_forced(mesh, group, samples, 1.0)[0], atol=tolerance)


def test_abort_hands_out_the_tokens_so_far(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(3)]
    command = start(bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=1500),
                    snapshot=mesh.actor.snapshot)
    outcome = bound.watch(command, on_samples=lambda: bound.abort(command))
    assert isinstance(outcome.error, Aborted)
    assert outcome.kinds[-1] == "failure"
    aborted = [sample for sample in outcome.samples.values() if sample.finish_reason == "aborted"]
    assert aborted
    assert all(0 < len(sample.token_ids) < 1500 for sample in aborted)
    whole = tokens_of(generate(mesh, bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=300)))
    for sample in aborted:
        tokens = sample.token_ids.tolist()[:300]
        assert whole[sample.group_index, sample.sample_index][: len(tokens)] == tokens
    assert ledger_bytes(mesh.session, "rollout_kv") == 0


def test_deadline(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(10)]
    sampling = dataclasses.replace(SAMPLING, max_response_tokens=1500)
    with pytest.raises(DeadlineExceeded):
        generate(mesh, bound, groups, sampling, timeout_s=0.1)
    assert len(generate(mesh, bound, groups).samples) == 80


def test_stale_snapshots_are_refused_and_change_nothing(mesh, bound):
    group = mesh.prompts.group("text")
    for number in (mesh.actor.snapshot + 1, -1):
        with pytest.raises(WrongState) as caught:
            generate(mesh, bound, [group], snapshot=number)
        assert caught.value.reason == "STALE_SNAPSHOT"
    with pytest.raises(WrongState):
        bound.bind(mesh.actor.snapshot + 1)
    assert len(generate(mesh, bound, [group]).samples) == 4
    bound.quiesce(leave=True)
    with pytest.raises(WrongState):
        generate(mesh, bound, [group])


def test_another_prompt_than_the_coordinators_is_refused(mesh, bound):
    groups = [mesh.prompts.group("text", 0), mesh.prompts.group("video", 7)]
    groups[1] = dataclasses.replace(groups[1], media=(dataclasses.replace(groups[1].media[0], fps=1.0),))
    with pytest.raises(DataLoss) as caught:
        generate(mesh, bound, groups)
    assert caught.value.reason == "PROMPT_MISMATCH"
    assert caught.value.metadata["group_index"] == "7"
    assert {caught.value.metadata["found"], caught.value.metadata["expected"]} > {groups[1].prompt_hash}


@pytest.mark.parametrize("changes", [{"sample_count": 0}, {"token_ids": None}])
def test_bad_groups_are_refused(mesh, bound, changes):
    group = mesh.prompts.group("text")
    if "token_ids" in changes:
        changes = {"token_ids": group.token_ids[:0]}
    with pytest.raises(BadInput):
        generate(mesh, bound, [dataclasses.replace(group, **changes)])
    with pytest.raises(BadInput):
        generate(mesh, bound, [group, group])


def test_parameters_are_the_slabs_bytes(mesh, bound):
    result = bound.bind(mesh.actor.snapshot)
    assert result.bound_parameters == len(mesh.actor.layout.tensors)
    assert result.inodes == mesh.actor.inodes_of_replica
    assert ledger_bytes(mesh.session, "actor_snapshot") == mesh.actor.topology.device_count * mesh.actor.layout.size_bytes


def test_a_publish_changes_greedy_output_without_a_reload(mesh, bound):
    group = mesh.prompts.group("video", samples=1)
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    before = tokens_of(generate(mesh, bound, [group], greedy))
    bound.quiesce()

    def shift(views):
        views["lm_head.weight"].copy_(views["lm_head.weight"].roll(1, 0).clone())

    bound.bind(mesh.actor.publish(shift))
    changed = tokens_of(generate(mesh, bound, [group], greedy))
    assert changed != before
    bound.quiesce()

    def shift_back(views):
        views["lm_head.weight"].copy_(views["lm_head.weight"].roll(-1, 0).clone())

    bound.bind(mesh.actor.publish(shift_back))
    assert tokens_of(generate(mesh, bound, [group], greedy)) == before


def test_an_update_waits_for_quiesce(mesh, bound):
    with pytest.raises(Aborted) as caught:
        mesh.actor.publish(lambda views: None)
    assert caught.value.reason == "READERS_REMAIN"


def test_keys_and_values_are_in_the_ledger_and_go(mesh, bound):
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(2)]
    seen = []
    command = start(bound, groups, dataclasses.replace(SAMPLING, max_response_tokens=200), snapshot=mesh.actor.snapshot)
    outcome = bound.watch(command, on_samples=lambda: seen.append(ledger_bytes(mesh.session, "rollout_kv")))
    assert outcome.error is None
    assert seen[0] > 0
    assert ledger_bytes(mesh.session, "rollout_kv") == 0
    assert bound.quiesce(leave=False).released_bytes == 0
    assert ledger_bytes(mesh.session, "rollout_kv") == 0


def test_media_slabs_are_leased_only_while_read(mesh, bound):
    group = mesh.prompts.group("mixed")
    generate(mesh, bound, [group])
    slab = group.media[0].frames.slab
    assert mesh.session.delete(slab) > 0  # refused while anybody leases it


def test_join_tells_role_and_layout(mesh, bound):
    from rollplex.engine.layout_hash import layout_hash

    assert bound.joined.role == "rollout"
    assert bound.joined.layout_hash == layout_hash(mesh.oracle.config, mesh.actor.layout)
