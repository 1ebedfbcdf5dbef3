"""The coordinator over stub engines: order of work, barriers, failures, filtering, mini-batches, cancellation, restart."""

from __future__ import annotations

import asyncio
import json
import math
import threading

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.config import CoordinatorConfig
from rollplex.coordinator.records import IterationKey, IterationState, Note, PhaseSpan, RewardRegistration, RunState
from rollplex.core.errors import AlreadyExists, BadInput, DataLoss, NotFound, Unavailable, WrongState
from rollplex.data.rows import PromptRow


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint) as mesh:
        yield mesh


async def open_run(mesh, name="run", **config):
    return await mesh.coordinator.create_run(name, json.dumps(config))


async def iterate(mesh, rows=None, name="run", **options):
    iteration, _ = await mesh.coordinator.submit(name, rows or text_rows(3), "", validation=False)
    return await mesh.finished(iteration.key, **options)


async def events_of(mesh, kind, name="run"):
    await mesh.coordinator.runs.log_of(mesh.coordinator.runs.get(name)).flush()
    return [event.body for event in await mesh.coordinator.journal.events(name, 0, 10000) if isinstance(event.body, kind)]


async def test_an_iteration_goes_through_its_phases_and_publishes(mesh):
    await open_run(mesh, sampling={"samples_per_group": 4})
    done = await iterate(mesh)
    assert done.state is IterationState.DONE
    run = mesh.coordinator.runs.get("run")
    assert (run.snapshot, run.optimizer_step, run.prompts_consumed) == (1, 1, 3)
    assert mesh.trainer.calls == ["open_run", "bind_snapshot", "bind_snapshot", "materialize_prefix", "train_suffix",
                                  "leave_snapshot", "measure_gradient", "apply_update", "bind_snapshot"]
    assert mesh.reference.calls == []  # kl_coef is 0: no reference work at all
    groups, scale = mesh.trainer.trained[0]
    assert [group.group_index for group in groups] == [0, 1, 2]
    assert (scale.sample_count, scale.token_count) == (12, 36)
    assert [round(sample.advantage, 3) for sample in groups[0].samples] == [-0.866, 0.866, -0.866, 0.866]
    assert mesh.trainer.bound_snapshot == 1
    for name in ("reward", "reward_std", "rewards/stub/mean", "rewards/stub/accuracy/mean", "completions/mean_length",
                 "timing_s/step", "perf/throughput", "actor/pg_loss", "actor/grad_norm", "actor/lr",
                 "frac_reward_zero_std", "response_length/mean", "rollplex/overlap/window_s", "timing_s/ready",
                 "timing_s/release_kv", "timing_s/leave_snapshot", "timing_s/grad_norm", "timing_s/write_weights",
                 "timing_s/bind"):
        assert math.isfinite(done.metrics[name]), name
    assert done.metrics["rewards/stub/mean"] == 0.5
    for name, value in {"prefill_s": 0.25, "decode_s": 0.5, "decode_steps": 2, "decode_batch": 12}.items():
        assert done.metrics[f"rollplex/rollout/{name}"] == value


async def test_the_reference_works_only_with_a_kl(mesh):
    await open_run(mesh, loss={"kl_coef": 0.1})
    await iterate(mesh)
    assert "materialize_prefix" in mesh.reference.calls
    assert "score_suffix" in mesh.reference.calls
    assert mesh.trainer.trained[0][0][0].samples[0].reference_logprobs is not None


def trained_groups(mesh):
    return [[group.group_index for group in groups] for groups, _ in mesh.trainer.trained]


@pytest.mark.parametrize(("config", "count", "expected"), [
    ({"schedule": "serial"}, 6, [[0, 1, 2, 3, 4, 5]]), ({"loss": {"kl_coef": 0.0}}, 6, [[0, 1, 2, 3, 4, 5]]),
    ({}, 6, [[0], [1, 2], [3], [4, 5]]), ({}, 2, [[0], [1]]),
    # Groups that share a pass are not parted.
    ({"suffix_micro_batch_samples": 8}, 5, [[0, 1], [2, 3], [4]])], ids=str)
async def test_the_trainer_is_told_of_groups_as_they_are_scored(mesh, config, count, expected):
    await open_run(mesh, **{"loss": {"kl_coef": 0.1}, "sampling": {"samples_per_group": 4}} | config)
    assert (await iterate(mesh, text_rows(count))).state is IterationState.DONE
    assert trained_groups(mesh) == expected
    scales = {(scale.sample_count, scale.token_count) for _, scale in mesh.trainer.trained}
    assert scales == {(4 * count, 12 * count)}
    with_reference = "loss" not in config
    assert mesh.reference.calls.count("score_suffix") == (len(expected) if with_reference else 0)
    assert all((sample.reference_logprobs is not None) == with_reference
               for groups, _ in mesh.trainer.trained for group in groups for sample in group.samples)


async def test_old_log_probabilities_are_of_the_groups_that_are_trained_together(mesh):
    """Which groups share a pass decides last bits, and the first ratio is to be 1 exactly."""
    await open_run(mesh, optimizer={"updates_per_iteration": 2}, suffix_micro_batch_samples=8, sampling={"samples_per_group": 4})
    assert (await iterate(mesh, text_rows(6))).state is IterationState.DONE
    assert mesh.trainer.scored == trained_groups(mesh) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
async def test_what_is_left_out_of_training_is_not_scored(mesh, schedule):
    mesh.reward.value = lambda item: float(item.group_index == 1 or item.sample_index % 2)
    await open_run(mesh, schedule=schedule, filter_zero_variance=True, loss={"kl_coef": 0.1}, sampling={"samples_per_group": 4})
    assert (await iterate(mesh, text_rows(4))).state is IterationState.DONE
    for told in (mesh.reference.scored, trained_groups(mesh)):
        assert [index for part in told for index in part] == [0, 2, 3]


async def test_training_begins_while_the_reference_scores(mesh):
    """The reference's second part waits for the trainer's first: side by side that ends."""
    gate = threading.Event()
    mesh.trainer.hooks["train_suffix"] = lambda context: gate.set()

    def wait_for_training(context):
        if mesh.reference.calls.count("score_suffix") == 2:
            assert gate.wait(20)

    mesh.reference.hooks["score_suffix"] = wait_for_training
    await open_run(mesh, loss={"kl_coef": 0.1})
    assert (await iterate(mesh, text_rows(4))).state is IterationState.DONE


async def test_a_reference_that_cannot_score_ends_the_iteration_and_leaves_no_training_behind(mesh):
    def fail(context):
        if mesh.reference.calls.count("score_suffix") == 2:
            raise DataLoss("what it should read is not what it was", reason="TEST")

    mesh.reference.hooks["score_suffix"] = fail
    await open_run(mesh, loss={"kl_coef": 0.1})
    failed = await iterate(mesh, text_rows(4))
    assert (failed.state, failed.error.reason) == (IterationState.FAILED, "TEST")
    assert mesh.coordinator.runs.get("run").snapshot == 0 and trained_groups(mesh) in ([], [[0]])
    del mesh.reference.hooks["score_suffix"]
    mesh.trainer.trained.clear()
    assert (await iterate(mesh, text_rows(4))).state is IterationState.DONE
    assert trained_groups(mesh) == [[0], [1], [2], [3]]


async def hold_last_token_until_prefix(mesh, schedule):
    gate = mesh.rollout.last_token_gate = threading.Event()
    mesh.trainer.hooks["materialize_prefix"] = lambda context: gate.set()
    await open_run(mesh, schedule=schedule, phase_timeout_s=1.5)
    return await iterate(mesh)


async def test_overlap_really_overlaps(mesh):
    """Rollout's last token waits for the prefix: side by side that ends."""
    assert (await hold_last_token_until_prefix(mesh, "overlap")).state is IterationState.DONE


async def test_serial_does_not_overlap(mesh):
    """The same wait under `serial` runs into the phase's deadline, says so, and leaves the snapshot."""
    failed = await hold_last_token_until_prefix(mesh, "serial")
    assert failed.state is IterationState.FAILED
    assert failed.error.kind == "DeadlineExceeded"
    assert "rollout" in failed.error.message
    assert mesh.coordinator.runs.get("run").snapshot == 0
    mesh.rollout.last_token_gate = None
    assert (await iterate(mesh)).state is IterationState.DONE


async def test_spans_of_serial_do_not_intersect_and_those_of_overlap_do(mesh):
    mesh.rollout.hooks["generate"] = mesh.trainer.hooks["materialize_prefix"] = lambda context: threading.Event().wait(0.1)
    spans = {}
    for schedule in ("serial", "overlap"):
        await open_run(mesh, schedule, schedule=schedule)
        await iterate(mesh, name=schedule)
        ended = {span.span: span for span in await events_of(mesh, PhaseSpan, schedule) if span.ended}
        spans[schedule] = ended["generate"], ended["trainer_prefix"]
    generate, prefix = spans["serial"]
    assert prefix.start_s >= generate.start_s + generate.duration_s - 1e-3
    generate, prefix = spans["overlap"]
    assert prefix.start_s < generate.start_s + generate.duration_s


async def test_an_engine_error_ends_the_iteration_and_the_next_one_works(mesh):
    def fail(context):
        raise RuntimeError("the card is on fire")

    mesh.trainer.hooks["train_suffix"] = fail
    await open_run(mesh)
    failed = await iterate(mesh)
    assert (failed.state, failed.error.kind) == (IterationState.FAILED, "InternalError")
    assert failed.error.message == "trainer-0 in SUFFIX: RuntimeError: the card is on fire"
    assert "skip_update" in mesh.trainer.calls  # gradients of the broken iteration are zeroed
    mesh.trainer.hooks.clear()
    assert (await iterate(mesh)).state is IterationState.DONE
    assert mesh.coordinator.runs.get("run").snapshot == 1


async def test_a_gradient_that_is_not_finite_skips_the_update(mesh):
    mesh.trainer.grad_norms = [math.nan]
    await open_run(mesh)
    done = await iterate(mesh)
    assert (done.state, done.metrics["rollplex/update_skipped"]) == (IterationState.DONE, 1.0)
    assert mesh.coordinator.runs.get("run").snapshot == 0
    assert [note.reason for note in await events_of(mesh, Note)] == ["NON_FINITE_GRADIENT"]
    assert (await iterate(mesh)).metrics["rollplex/update_skipped"] == 0.0


async def test_clipping_and_schedule_reach_the_trainer(mesh):
    mesh.trainer.grad_norms = [4.0]
    await open_run(mesh, optimizer={"max_grad_norm": 2.0, "warmup_steps": 4, "learning_rate": 1e-3})
    done = await iterate(mesh)
    order = mesh.trainer.orders[-1]
    assert order.clip_coefficient == pytest.approx(0.5, rel=1e-6)
    assert (order.learning_rate_factor, order.optimizer_step) == (0.25, 1)
    assert done.metrics["actor/lr"] == 0.25e-3


async def test_an_update_that_breaks_off_is_rolled_forward(mesh):
    broken = []

    def fail_once(context):
        if not broken:
            broken.append(1)
            raise RuntimeError("half way")

    mesh.trainer.hooks["apply_update"] = fail_once
    await open_run(mesh)
    done = await iterate(mesh)
    assert done.state is IterationState.DONE
    assert mesh.trainer.calls.count("apply_update") == 2
    assert "attach" in mesh.trainer.calls
    assert mesh.coordinator.runs.get("run").snapshot == 1
    assert await mesh.coordinator.journal.open_update("run") is None


async def break_updates(mesh):
    """Submits an iteration whose update fails as often as it is tried; returns it once the run is RECOVERING."""
    def fail(context):
        raise RuntimeError("half way")

    mesh.trainer.hooks["apply_update"] = fail
    await open_run(mesh)
    iteration, _ = await mesh.coordinator.submit("run", text_rows(3), "", validation=False)
    async for event in mesh.coordinator.watch("run", 0):
        if isinstance(event.body, Note) and "tried again" in event.body.message:
            break
    return iteration


async def test_a_recovering_run_takes_nothing_and_goes_on_by_itself(mesh):
    iteration = await break_updates(mesh)
    with pytest.raises(Unavailable) as refused:
        await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    assert refused.value.reason == "RUN_RECOVERING"
    with pytest.raises(WrongState, match="only goes forward"):
        await mesh.coordinator.cancel(iteration.key)
    with pytest.raises(WrongState, match="busy"):
        await open_run(mesh, "other")
    mesh.trainer.hooks.clear()
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    assert (mesh.coordinator.runs.get("run").state, mesh.coordinator.runs.get("run").snapshot) == (RunState.ACTIVE, 1)
    assert (await iterate(mesh)).state is IterationState.DONE


async def test_a_restarted_coordinator_rolls_an_open_update_forward_and_calls_its_iteration_done(mesh):
    iteration = await break_updates(mesh)
    await mesh.restart()
    mesh.trainer.hooks.clear()
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    assert (mesh.coordinator.runs.get("run").state, mesh.coordinator.runs.get("run").snapshot) == (RunState.ACTIVE, 1)
    assert (await iterate(mesh)).state is IterationState.DONE


async def test_an_iteration_whose_update_is_published_is_done_whatever_follows(mesh):
    def fail_after_the_update(context):
        if mesh.trainer.calls.count("apply_update") == 1:
            raise RuntimeError("late")

    mesh.rollout.hooks["bind_snapshot"] = fail_after_the_update
    await open_run(mesh)
    assert (await iterate(mesh)).state is IterationState.DONE
    assert mesh.coordinator.runs.get("run").snapshot == 1
    mesh.rollout.hooks.clear()
    assert (await iterate(mesh)).state is IterationState.DONE


async def test_an_iteration_that_breaks_off_between_its_updates_says_that_weights_moved(mesh):
    def fail_second(context):
        if mesh.trainer.calls.count("train_suffix") == 2:
            raise RuntimeError("second mini-batch")

    mesh.trainer.hooks["train_suffix"] = fail_second
    await open_run(mesh, optimizer={"updates_per_iteration": 2})
    failed = await iterate(mesh, text_rows(4))
    assert (failed.state, failed.error.reason) == (IterationState.FAILED, "UPDATED_IN_PART")
    assert mesh.coordinator.runs.get("run").snapshot == 1


async def test_groups_without_signal_are_counted_and_can_be_filtered(mesh):
    mesh.reward.value = lambda item: float(item.sample_index % 2) if item.group_index == 1 else 1.0
    await open_run(mesh, "keeps")
    kept = await iterate(mesh, name="keeps")
    assert (kept.metrics["rollplex/groups_without_signal"], kept.metrics["rollplex/groups_filtered"]) == (2.0, 0.0)
    assert kept.metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    await open_run(mesh, "filters", filter_zero_variance=True)
    filtered = await iterate(mesh, name="filters")
    assert filtered.metrics["rollplex/groups_filtered"] == 2.0
    assert [group.group_index for group in mesh.trainer.trained[-1][0]] == [1]
    mesh.reward.value = lambda item: 1.0
    nothing = await iterate(mesh, name="filters")
    assert (nothing.state, nothing.metrics["rollplex/update_skipped"]) == (IterationState.DONE, 1.0)


async def test_several_updates_a_rollout_use_stored_log_probabilities(mesh):
    await open_run(mesh, optimizer={"updates_per_iteration": 2})
    await iterate(mesh, text_rows(4))
    first, second = mesh.trainer.trained
    assert ([group.group_index for group in first[0]], [group.group_index for group in second[0]]) == ([0, 1], [2, 3])
    assert all(sample.old_logprobs is not None for groups, _ in (first, second) for group in groups
               for sample in group.samples)
    assert mesh.trainer.calls.count("materialize_prefix") == 2  # the second under the new snapshot
    assert mesh.coordinator.runs.get("run").snapshot == 2


async def test_unscored_samples_have_no_reward_no_advantage_and_are_counted(mesh):
    mesh.reward.value = lambda item: None if item.sample_index == 0 else float(item.sample_index % 2)
    await open_run(mesh)
    done = await iterate(mesh)
    assert done.metrics["reward/unscored_count"] == 3.0
    sample = mesh.trainer.trained[0][0][0].samples[0]
    assert (sample.scored, sample.advantage) == (False, 0.0)
    assert [note.reason for note in await events_of(mesh, Note)] == ["UNSCORED"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_a_reward_that_is_not_finite_is_unscored(mesh, bad):
    mesh.reward.value = lambda item: bad if item.sample_index == 1 else 0.0
    await open_run(mesh)
    assert (await iterate(mesh)).metrics["reward/unscored_count"] == 3.0


async def test_a_reward_that_is_down_costs_its_samples_not_the_iteration(mesh):
    await mesh.coordinator.rewards.register(RewardRegistration("down", "unix:/nowhere/r.sock", 1.0, 0.2, 1))
    await open_run(mesh)
    done = await iterate(mesh)
    assert done.state is IterationState.DONE
    assert done.metrics["reward/unscored_count"] == 24.0
    await mesh.coordinator.rewards.unregister("down")
    assert (await iterate(mesh)).metrics["reward/unscored_count"] == 0.0


async def test_rewards_are_weighted_and_can_change_during_a_run(mesh):
    await open_run(mesh)
    await mesh.coordinator.rewards.register(RewardRegistration("second", mesh.mesh.address("reward"), -0.5))
    assert (await iterate(mesh)).metrics["reward"] == pytest.approx(0.5 * (1 - 0.5))
    await mesh.coordinator.rewards.register(RewardRegistration("second", mesh.mesh.address("reward"), 1.0))
    assert (await iterate(mesh)).metrics["reward"] == pytest.approx(1.0)
    with pytest.raises(NotFound):
        await mesh.coordinator.rewards.unregister("third")
    with pytest.raises(BadInput):
        await mesh.coordinator.rewards.register(RewardRegistration("x", "nowhere"))


async def test_bad_prompts_are_refused_by_index_and_nothing_is_queued(mesh):
    await open_run(mesh)
    rows = text_rows(4)
    rows[1] = PromptRow(1, [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}])
    rows[3] = PromptRow(3, [{"role": "user", "content": [{"type": "text", "text": ""}]}])
    with pytest.raises(BadInput) as refused:
        await mesh.coordinator.submit("run", rows, "", validation=False)
    assert refused.value.metadata["indices"] == "1,3"
    assert "the other 2 are untouched" in str(refused.value)
    assert mesh.rollout.calls.count("generate") == 0
    assert mesh.coordinator.runs.get("run").next_iteration == 0
    with pytest.raises(BadInput, match="at least one prompt"):
        await mesh.coordinator.submit("run", [], "", validation=False)


async def test_the_same_request_id_is_the_same_iteration(mesh):
    await open_run(mesh)
    first, _ = await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False)
    again, _ = await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False)
    assert first.key == again.key
    await mesh.finished(first.key)
    assert (await mesh.coordinator.submit("run", text_rows(1), "abc", validation=False))[0].state is IterationState.DONE


async def test_cancel_queued_running_and_ended(mesh):
    gate = mesh.rollout.last_token_gate = threading.Event()
    await open_run(mesh)
    running, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    queued, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    await asyncio.sleep(0.2)
    assert await mesh.coordinator.cancel(queued.key) is IterationState.CANCELLED
    assert await mesh.coordinator.cancel(running.key) is IterationState.CANCELLED
    gate.set()
    assert (await mesh.finished(queued.key)).state is IterationState.CANCELLED
    assert mesh.coordinator.runs.get("run").snapshot == 0
    done = await iterate(mesh)
    assert done.state is IterationState.DONE
    assert await mesh.coordinator.cancel(done.key) is IterationState.DONE


async def test_validation_is_greedy_and_trains_nothing(mesh):
    await open_run(mesh)
    iteration, _ = await mesh.coordinator.submit("run", text_rows(2), "", validation=True)
    done = await mesh.finished(iteration.key)
    assert (done.state, done.key) == (IterationState.DONE, IterationKey("run", 0, True))
    assert "train_suffix" not in mesh.trainer.calls
    assert len(await mesh.coordinator.samples(done.key)) == 2
    assert (mesh.coordinator.runs.get("run").snapshot, mesh.coordinator.runs.get("run").next_iteration) == (0, 0)


async def test_runs(mesh):
    await open_run(mesh, "one", seed=1)
    assert (await open_run(mesh, "one", seed=1)).name == "one"
    with pytest.raises(AlreadyExists):
        await open_run(mesh, "one", seed=2)
    await open_run(mesh, "two")
    assert mesh.coordinator.runs.get("one").state is RunState.CLOSED
    with pytest.raises(WrongState, match="closed"):
        await mesh.coordinator.submit("one", text_rows(1), "", validation=False)
    with pytest.raises(NotFound):
        await mesh.coordinator.submit("three", text_rows(1), "", validation=False)
    with pytest.raises(BadInput, match="did you mean 'schedule'"):
        await open_run(mesh, "four", shedule="serial")


async def test_without_a_reward_nothing_is_accepted(mesh):
    await mesh.coordinator.rewards.unregister("stub")
    await open_run(mesh)
    with pytest.raises(WrongState, match="reward add"):
        await mesh.coordinator.submit("run", text_rows(1), "", validation=False)


async def test_a_restarted_coordinator_goes_on_with_what_ran_and_then_with_what_was_queued(mesh):
    mesh.rollout.last_token_gate = threading.Event()
    await open_run(mesh)
    running, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    queued, _ = await mesh.coordinator.submit("run", text_rows(2), "", validation=False)
    dropped, _ = await mesh.coordinator.submit("run", text_rows(2), "", validation=False)
    await asyncio.sleep(0.2)
    assert await mesh.coordinator.cancel(dropped.key) is IterationState.CANCELLED
    mesh.rollout.last_token_gate.set()
    mesh.rollout.last_token_gate = None
    await mesh.restart()
    assert (await mesh.finished(queued.key)).state is IterationState.DONE
    done = await mesh.coordinator.iteration(running.key)
    assert (done.state, done.snapshot) == (IterationState.DONE, 0)
    assert (await mesh.coordinator.iteration(dropped.key)).state is IterationState.CANCELLED
    assert mesh.trainer.calls.count("train_suffix") == 2
    assert "RESUMED" in [note.reason for note in await events_of(mesh, Note)]
    events = await mesh.coordinator.journal.events("run", 0, 10000)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


async def test_a_client_that_goes_away_leaves_nothing_half_done(mesh):
    """Submitting goes on without its caller: the iteration is there, once, and runs."""
    await open_run(mesh)
    caller = asyncio.create_task(mesh.coordinator.submit("run", text_rows(50), "gone", validation=False))
    await asyncio.sleep(0.005)
    caller.cancel()
    iteration, _ = await mesh.coordinator.submit("run", text_rows(50), "gone", validation=False)
    assert (await mesh.finished(iteration.key)).state is IterationState.DONE
    assert mesh.rollout.calls.count("generate") == 1
    assert mesh.coordinator.runs.get("run").next_iteration == 1


async def test_cancelling_twice_and_during_clean_up_ends_once(mesh):
    mesh.rollout.last_token_gate = threading.Event()
    mesh.trainer.hooks["quiesce"] = lambda context: threading.Event().wait(0.2)
    await open_run(mesh)
    running, _ = await mesh.coordinator.submit("run", text_rows(1), "", validation=False)
    await asyncio.sleep(0.1)
    states = await asyncio.gather(*(mesh.coordinator.cancel(running.key) for _ in range(3)))
    assert states == [IterationState.CANCELLED] * 3
    assert (await mesh.coordinator.journal.iteration(running.key)).state is IterationState.CANCELLED


async def test_a_run_that_cannot_open_leaves_the_open_one(mesh):
    await open_run(mesh, "one")
    await mesh.coordinator.mesh.reference.close()
    mesh.coordinator.mesh.reference = type(mesh.coordinator.mesh.trainer)(
        "reference", {"reference-0": "unix:/nowhere/r.sock"}, lambda channel: None)
    with pytest.raises(Unavailable):
        await open_run(mesh, "two", loss={"kl_coef": 0.1})
    assert mesh.coordinator.runs.get("one").state is RunState.ACTIVE
    assert (await iterate(mesh, name="one")).state is IterationState.DONE


async def test_without_any_score_nothing_is_learned(mesh):
    mesh.reward.value = lambda item: None
    await open_run(mesh)
    done = await iterate(mesh)
    assert (done.state, done.metrics["rollplex/update_skipped"]) == (IterationState.DONE, 1.0)
    assert "apply_update" not in mesh.trainer.calls
    assert mesh.coordinator.runs.get("run").snapshot == 0


async def test_a_monstrous_reward_is_unscored(mesh):
    mesh.reward.value = lambda item: 1e200 if item.sample_index == 1 else 0.0
    await open_run(mesh)
    assert (await iterate(mesh)).metrics["reward/unscored_count"] == 3.0


async def test_events_are_numbered_without_gaps_and_resume(mesh):
    await open_run(mesh)
    await iterate(mesh)
    log = mesh.coordinator.runs.log_of(mesh.coordinator.runs.get("run"))
    await log.flush()
    everything = await mesh.coordinator.journal.events("run", 0, 1000)
    assert [event.sequence for event in everything] == list(range(1, log.last_sequence + 1))
    resumed = []
    async for event in mesh.coordinator.watch("run", 3):
        resumed.append(event)
        if event.sequence == log.last_sequence:
            break
    assert resumed == everything[3:]


async def test_two_mini_batches_leave_no_group_out(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint, CoordinatorConfig(builtin_reward="")) as mesh:
        await open_run(mesh, optimizer={"updates_per_iteration": 4})
        await iterate(mesh, text_rows(3))  # fewer groups than updates asked for
        assert [[group.group_index for group in groups] for groups, _ in mesh.trainer.trained] == [[0], [1], [2]]
