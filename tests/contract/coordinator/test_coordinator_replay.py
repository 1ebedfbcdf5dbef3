"""Teacher-forced replay: recorded prompts, responses and rewards, another schedule, the same training."""

from __future__ import annotations

import json
import threading

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator.config import CoordinatorConfig
from rollplex.coordinator.records import IterationState
from rollplex.core.errors import BadInput, NotFound, WrongState


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint):
    async with stub_mesh(tmp_path / "run", tiny_checkpoint) as mesh:
        yield mesh


async def create(mesh, name, **config):
    return await mesh.coordinator.create_run(name, json.dumps(config))


async def iterate(mesh, name, rows=()):
    iteration, _ = await mesh.coordinator.submit(name, list(rows), "", validation=False)
    return await mesh.finished(iteration.key)


async def record(mesh, iterations=2, **config):
    """Responses, rewards and lengths differ from iteration to iteration; one sample is unscored."""
    await create(mesh, "recorded", **{"sampling": {"samples_per_group": 3}, "seed": 5, **config})
    for number in range(iterations):
        mesh.rollout.respond = lambda group, sample, number=number: [10 * number + group, sample, 7][: 2 + sample % 2]
        mesh.reward.value = lambda item, number=number: None if item.sample_index == 2 else number + item.sample_index
        assert (await iterate(mesh, "recorded", text_rows(2 + number))).state is IterationState.DONE
    trained = mesh.trainer.trained[-iterations:]
    mesh.trainer.trained.clear()
    return trained


def plain(trained):
    """What the trainer was given, without the recorded run's log-probability bits being compared as objects."""
    return [([(group.group_index, [(list(sample.token_ids), list(sample.rollout_logprobs), sample.advantage, sample.scored)
                                   for sample in group.samples]) for group in groups], scale) for groups, scale in trained]


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
async def test_a_replay_trains_on_what_was_recorded_and_generates_nothing(mesh, schedule):
    recorded = await record(mesh)
    generated, scored = mesh.rollout.calls.count("generate"), mesh.reward.requests
    run = await create(mesh, "replay", replay="recorded", schedule=schedule)
    config = json.loads(run.config_json)
    assert (config["seed"], config["sampling"]["samples_per_group"], config["schedule"]) == (5, 3, schedule)
    assert run.replay_iterations == 2
    for _ in range(2):
        assert (await iterate(mesh, "replay")).state is IterationState.DONE
    assert plain(mesh.trainer.trained) == plain(recorded)
    assert (mesh.rollout.calls.count("generate"), mesh.reward.requests) == (generated, scored)
    assert mesh.rollout.bound_snapshot == 2
    assert "materialize_prefix" in mesh.trainer.calls
    with pytest.raises(WrongState, match="2 iterations that were done") as ended:
        await iterate(mesh, "replay")
    assert ended.value.reason == "REPLAY_ENDED"


async def test_a_replays_samples_are_its_own_and_can_be_replayed(mesh):
    recorded = await record(mesh, 1)
    await create(mesh, "replay", replay="recorded")
    done = await iterate(mesh, "replay")
    assert done.metrics["reward/unscored_count"] == 2.0
    assert [sample.text for sample in await mesh.coordinator.samples(done.key)] != [""] * 6
    await create(mesh, "again", replay="replay")
    await iterate(mesh, "again")
    assert plain(mesh.trainer.trained) == plain(recorded) * 2


async def test_iterations_that_failed_are_skipped_on_both_sides(mesh):
    await create(mesh, "recorded")

    def fail(context):
        raise RuntimeError("once")

    mesh.trainer.hooks["train_suffix"] = fail
    assert (await iterate(mesh, "recorded", text_rows(1))).state is IterationState.FAILED
    mesh.trainer.hooks.clear()
    await iterate(mesh, "recorded", text_rows(2))
    assert (await create(mesh, "replay", replay="recorded")).replay_iterations == 1
    mesh.trainer.hooks["train_suffix"] = fail
    assert (await iterate(mesh, "replay")).state is IterationState.FAILED
    mesh.trainer.hooks.clear()
    done = await iterate(mesh, "replay")
    assert (done.state, done.recorded) == (IterationState.DONE, 1)
    assert len(mesh.trainer.trained[-1][0]) == 2


async def test_what_cannot_be_replayed_is_refused(mesh):
    with pytest.raises(NotFound, match="replay_journal"):
        await create(mesh, "replay", replay="nobody")
    await record(mesh, 1)
    await create(mesh, "replay", replay="recorded")
    with pytest.raises(BadInput, match="hand in none"):
        await mesh.coordinator.submit("replay", text_rows(1), "", validation=False)
    with pytest.raises(BadInput, match="at least one prompt"):
        await mesh.coordinator.submit("replay", [], "", validation=True)


async def test_a_replay_needs_no_reward_and_survives_a_restart(mesh):
    await record(mesh, 2)
    await mesh.coordinator.rewards.unregister("stub")
    await create(mesh, "replay", replay="recorded")
    gate = threading.Event()
    mesh.trainer.hooks["train_suffix"] = lambda context: gate.wait(5)
    running, _ = await mesh.coordinator.submit("replay", [], "", validation=False)
    queued, _ = await mesh.coordinator.submit("replay", [], "", validation=False)
    assert (running.recorded, queued.recorded) == (0, 1)
    gate.set()
    await mesh.finished(running.key)
    await mesh.restart()
    assert (await mesh.finished(queued.key)).state is IterationState.DONE


async def test_another_meshs_run_is_found_through_its_journal(tmp_path, tiny_checkpoint, mesh):
    recorded = plain(await record(mesh))
    other = CoordinatorConfig(builtin_reward="", replay_journal=tmp_path / "run" / "journal.sqlite")
    async with stub_mesh(tmp_path / "two", tiny_checkpoint, other, train_tensor_parallel=2) as wide:
        await create(wide, "replay", replay="recorded")
        for _ in range(2):
            await iterate(wide, "replay")
        for trainer in wide.trainers:
            assert plain(trainer.trained) == recorded


async def test_a_journal_that_is_not_there_is_refused(tmp_path, tiny_checkpoint):
    config = CoordinatorConfig(builtin_reward="", replay_journal=tmp_path / "none.sqlite")
    with pytest.raises(BadInput, match="none.sqlite"):
        async with stub_mesh(tmp_path / "run", tiny_checkpoint, config):
            pass
