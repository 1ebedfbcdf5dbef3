"""The coordinator's recovery over stub engines: every role lost at every point of an iteration, and the coordinator itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter

import pytest
from stub_mesh import stub_mesh, text_rows

from rollplex.coordinator import peers, ranks, recovery
from rollplex.coordinator.records import IterationState, Note
from rollplex.coordinator.recovery import LOSSES
from rollplex.core.errors import InternalError, OutOfMemory, Unavailable, WrongState
from rollplex.core.phases import Phase
from rollplex.core.work import ResidencyEntry
from rollplex.memory.client import BrokerSession

TWO_UPDATES = {"loss": {"kl_coef": 0.1}, "optimizer": {"updates_per_iteration": 2}, "deterministic": True,
               "sampling": {"samples_per_group": 4}, "recovery_timeout_s": 20.0}


@pytest.fixture
async def mesh(tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 3.0)
    async with stub_mesh(tmp_path / "run", tiny_checkpoint) as mesh:
        mesh.scored, mesh.most_scored = Counter(), threading.Event()

        def value(item):
            mesh.scored[item.group_index, item.sample_index] += 1
            if len(mesh.scored) == 15:
                mesh.most_scored.set()
            return float((item.group_index + item.sample_index) % 2)

        mesh.reward.value = value
        yield mesh


async def open_run(mesh, **config):
    return await mesh.coordinator.create_run("run", json.dumps({**TWO_UPDATES, **config}))


async def submit(mesh, count=4, *, validation=False):
    return (await mesh.coordinator.submit("run", text_rows(count), "", validation=validation))[0].key


async def notes(mesh, reason=""):
    await mesh.coordinator.runs.log_of(mesh.coordinator.runs.get("run")).flush()
    events = await mesh.coordinator.journal.events("run", 0, 10000)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    return [event.body.message for event in events if isinstance(event.body, Note) and reason in ("", event.body.reason)]


async def noted(mesh, reason):
    async for event in mesh.coordinator.watch("run", 0):
        if getattr(event.body, "reason", "") == reason:
            return event.body.message
    raise AssertionError("the watch ended")


class Killer:
    """The process of a service ends inside its `nth` call of `method`, and another takes its place."""

    def __init__(self, mesh, engine, method, nth=1, deaths=1):
        self.mesh, self.name, self.method, self.nth, self.deaths = mesh, f"{engine.role}-{engine.rank}", method, nth, deaths
        self.loop, self.engine, self.died = asyncio.get_running_loop(), engine, 0
        engine.hooks[method] = self.hook

    def hook(self, context):
        if self.engine.calls.count(self.method) == self.nth and self.died < self.deaths:
            self.died += 1
            self.nth = 1
            asyncio.run_coroutine_threadsafe(self.replace(), self.loop).result(10)
            raise RuntimeError("nobody is there to hear this")

    async def replace(self):
        await self.mesh.kill(self.name)
        self.engine = await self.mesh.replace(self.name)
        if self.died < self.deaths:
            self.engine.hooks[self.method] = self.hook


def reference_of(trained):
    """What training consists of, group by group."""
    return [[(group.group_index, [(list(sample.token_ids), sample.advantage, list(sample.reference_logprobs or ()),
                                   list(sample.old_logprobs or ())) for sample in group.samples]) for group in groups]
            for groups, _ in trained]


async def unfaulted(mesh):
    await mesh.coordinator.create_run("unfaulted", json.dumps(TWO_UPDATES))
    key = (await mesh.coordinator.submit("unfaulted", text_rows(4), "", validation=False))[0].key
    assert (await mesh.finished(key)).state is IterationState.DONE
    expected = reference_of(mesh.trainer.trained)
    for engine in (mesh.rollout, mesh.reference, mesh.trainer):
        engine.calls.clear()
    mesh.trainer.trained.clear()
    mesh.scored.clear()
    return expected


CELLS = [
    ("rollout", "bind_snapshot", 2), ("rollout", "generate", 1), ("rollout", "quiesce", 1), ("rollout", "leave_snapshot", 2),
    ("rollout", "bind_snapshot", 3), ("rollout", "bind_snapshot", 4),
    ("reference", "bind_snapshot", 2), ("reference", "materialize_prefix", 1), ("reference", "score_suffix", 1),
    ("reference", "leave_snapshot", 2), ("reference", "leave_snapshot", 3), ("reference", "bind_snapshot", 3),
    ("trainer", "bind_snapshot", 2), ("trainer", "materialize_prefix", 1), ("trainer", "score_suffix", 1),
    ("trainer", "train_suffix", 1), ("trainer", "leave_snapshot", 2), ("trainer", "measure_gradient", 1),
    ("trainer", "apply_update", 1), ("trainer", "bind_snapshot", 3), ("trainer", "materialize_prefix", 2),
    ("trainer", "train_suffix", 2), ("trainer", "measure_gradient", 2), ("trainer", "apply_update", 2),
    ("trainer", "bind_snapshot", 4),
]


@pytest.mark.parametrize(("role", "method", "nth"), CELLS)
async def test_a_service_lost_anywhere_does_its_own_work_again_and_the_others_go_on(mesh, role, method, nth):
    expected = await unfaulted(mesh)
    await open_run(mesh)
    engines = {name: getattr(mesh, name) for name in ("rollout", "reference", "trainer")}
    killer = Killer(mesh, engines[role], method, nth)
    done = await mesh.finished(await submit(mesh))
    assert killer.died == 1
    assert (done.state, done.error) == (IterationState.DONE, None)
    assert mesh.coordinator.runs.get("run").snapshot == 2
    # Each mini-batch once more at most, always with the same content; the last of each is what the update was made of.
    trained = reference_of(engines["trainer"].trained) + (reference_of(mesh.trainer.trained) if role == "trainer" else [])
    assert [batch for index, batch in enumerate(trained) if batch not in trained[:index]] == expected
    assert len(trained) == 2 + ((role, method) in (("trainer", "measure_gradient"), ("trainer", "leave_snapshot")))
    assert set(mesh.scored.values()) == {1} and len(mesh.scored) == 16
    if role != "rollout":
        assert engines["rollout"].calls.count("generate") == 1
    if role != "reference":
        assert engines["reference"].calls.count("score_suffix") == 1
        assert engines["reference"].calls.count("materialize_prefix") == 1
    assert done.metrics["actor/pg_loss"] == 0.25 and done.metrics["actor/grad_norm"] == 1.0
    # What the iteration can do without is there for the next one.
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE
    assert mesh.coordinator.runs.get("run").snapshot == 4


@pytest.mark.parametrize(("role", "method", "nth"), [
    ("reference", "score_suffix", 1), ("reference", "score_suffix", 3), ("trainer", "train_suffix", 1),
    ("trainer", "train_suffix", 3), ("trainer", "measure_gradient", 1), ("trainer", "apply_update", 1)])
async def test_a_loss_while_the_reference_scores_beside_training_costs_its_own_work_alone(mesh, role, method, nth):
    one_update = {"loss": {"kl_coef": 0.1}, "sampling": {"samples_per_group": 4}, "recovery_timeout_s": 20.0}
    await mesh.coordinator.create_run("unfaulted", json.dumps(one_update))
    key = (await mesh.coordinator.submit("unfaulted", text_rows(4), "", validation=False))[0].key
    assert (await mesh.finished(key)).state is IterationState.DONE
    expected = reference_of(mesh.trainer.trained)
    assert [len(groups) for groups in expected] == [1, 1, 1, 1]
    engines = {name: getattr(mesh, name) for name in ("reference", "trainer")}
    for engine in engines.values():
        engine.calls.clear()
    mesh.trainer.trained.clear()
    await mesh.coordinator.create_run("run", json.dumps(one_update))
    killer = Killer(mesh, engines[role], method, nth)
    done = await mesh.finished(await submit(mesh))
    assert (killer.died, done.state, done.error) == (1, IterationState.DONE, None)
    # A trainer that was lost before its norm was known begins the mini-batch anew.
    again = role == "trainer" and method != "apply_update"
    last = mesh.trainer.trained if again else engines["trainer"].trained
    assert reference_of(last) == expected
    if role == "reference":
        # Prefixes of the groups that were not scored, and those groups once more.
        assert mesh.reference.calls.count("materialize_prefix") == 1
        assert mesh.reference.calls.count("score_suffix") == 4 - (nth - 1)
    else:
        assert engines["reference"].calls.count("materialize_prefix") == 1
        assert engines["reference"].calls.count("score_suffix") == 4


@pytest.mark.parametrize(("role", "method", "nth", "again"), [
    ("reference", "score_suffix", 1, [0, 1, 2, 3, 4, 5]), ("reference", "score_suffix", 2, [2, 3, 4, 5]),
    ("trainer", "train_suffix", 2, [0, 1, 2, 3, 4, 5])])
async def test_prefixes_are_made_again_in_the_company_that_they_had(mesh, role, method, nth, again):
    """Of passes of two groups; group 3 is left out of training. Last bits depend on who shares a pass."""
    mesh.reward.value = lambda item: float(item.group_index == 3 or item.sample_index % 2)
    await open_run(mesh, optimizer={}, filter_zero_variance=True, suffix_micro_batch_samples=8)
    engines = {name: getattr(mesh, name) for name in ("reference", "trainer")}
    killer = Killer(mesh, engines[role], method, nth)
    assert (await mesh.finished(await submit(mesh, 6))).state is IterationState.DONE
    assert killer.died == 1
    everything = [list(range(6))]
    assert engines["trainer"].prepared == engines["reference"].prepared == everything
    assert getattr(mesh, role).prepared == [again]
    assert mesh.trainer.scored == [] and [[group.group_index for group in groups] for groups, _ in mesh.trainer.trained][-3:] == [
        [0, 1], [2], [4, 5]]


@pytest.mark.parametrize(("method", "nth", "prepared"), [
    # The first update's are OVERLAP's; those of the second are made under the new snapshot, of its own groups.
    ("train_suffix", 1, [[0, 1, 2, 3], [3, 4, 5]]), ("train_suffix", 2, [[3, 4, 5]])])
async def test_a_pass_that_lies_in_two_updates_is_made_again_as_it_was(mesh, method, nth, prepared):
    await open_run(mesh, suffix_micro_batch_samples=8)
    killer = Killer(mesh, mesh.trainer, method, nth)
    assert (await mesh.finished(await submit(mesh, 6))).state is IterationState.DONE
    assert killer.died == 1 and mesh.trainer.prepared == prepared


async def test_only_groups_that_are_not_complete_are_generated_again_and_nothing_is_scored_twice(mesh):
    await open_run(mesh)
    mesh.rollout.last_token_gate = threading.Event()
    key = await submit(mesh)
    await asyncio.to_thread(mesh.most_scored.wait, 20)
    await mesh.kill("rollout-0")
    replaced = await mesh.replace("rollout-0")
    assert (await mesh.finished(key)).state is IterationState.DONE
    assert [group.group_index for group in replaced.groups] == [3]
    assert set(mesh.scored.values()) == {1} and len(mesh.scored) == 16
    assert len(await mesh.coordinator.samples(key)) == 16
    lost, = await notes(mesh, "SERVICE_LOST")
    assert lost.startswith("rollout-0 was lost in OVERLAP (") and lost.endswith("done again: 1 of 4 groups")
    assert len(await notes(mesh, "SERVICE_BACK")) == 1


async def test_another_response_in_a_lost_samples_place_is_scored_itself(mesh):
    await open_run(mesh)
    mesh.rollout.last_token_gate = threading.Event()
    key = await submit(mesh)
    await asyncio.to_thread(mesh.most_scored.wait, 20)
    await mesh.kill("rollout-0")
    replaced = await mesh.replace("rollout-0")
    replaced.respond = lambda group, sample: [9, 9, 9, 9]
    assert (await mesh.finished(key)).state is IterationState.DONE
    samples = await mesh.coordinator.samples(key)
    assert len(samples) == 16
    assert all((list(sample.token_ids) == [9, 9, 9, 9]) == (sample.group_index == 3) for sample in samples)
    assert [mesh.scored[3, index] for index in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("role", "method"), [
    ("rollout", "generate"), ("trainer", "train_suffix"), ("trainer", "measure_gradient"), ("reference", "materialize_prefix"),
    ("trainer", "attach")])
async def test_two_losses_in_a_row_end_the_iteration_and_the_next_one_works(mesh, role, method):
    await open_run(mesh)
    first = "materialize_prefix" if method == "attach" else method
    killer = Killer(mesh, getattr(mesh, role), first, deaths=1 + (method != "attach"))
    if method == "attach":
        # The first one in work, its successor while it is brought back.
        replace = killer.replace

        async def and_again():
            await replace()
            killer.second = Killer(mesh, killer.engine, "attach")

        killer.replace = and_again
    failed = await mesh.finished(await submit(mesh))
    assert (failed.state, failed.error.reason) == (IterationState.FAILED, "SERVICE_FAILED_TWICE")
    assert f"{role}-0 failed twice in a row in " in failed.error.message
    assert f"rollplex logs {role}-0" in failed.error.message
    assert failed.error.metadata["first"] and failed.error.metadata["second"]
    assert mesh.coordinator.runs.get("run").snapshot == 0
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE


async def test_losses_with_work_done_in_between_are_not_in_a_row(mesh):
    await open_run(mesh)
    prefix = Killer(mesh, mesh.trainer, "materialize_prefix")
    replace = prefix.replace

    async def and_later():
        await replace()
        prefix.second = Killer(mesh, prefix.engine, "train_suffix")

    prefix.replace = and_later
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE
    assert prefix.second.died == 1
    assert len(await notes(mesh, "SERVICE_BACK")) == 2


async def test_a_service_that_does_not_come_back_ends_the_iteration_in_time(mesh, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.3)
    monkeypatch.setattr(peers, "JOIN_TIMEOUT_S", 0.3)
    await open_run(mesh, recovery_timeout_s=0.6)
    await mesh.kill("reference-0")
    failed = await mesh.finished(await submit(mesh))
    assert (failed.error.kind, failed.error.reason) == (Unavailable.__name__, "SERVICE_NOT_BACK")
    assert "reference-0 was lost" in failed.error.message and "run.recovery_timeout_s" in failed.error.message
    await mesh.replace("reference-0")
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE


async def test_a_phases_time_begins_anew_when_a_lost_service_is_back(mesh, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.2)
    monkeypatch.setattr(peers, "JOIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(recovery, "PHASE_GRACE_S", 0.0)
    await open_run(mesh, phase_timeout_s=3.0)
    mesh.rollout.last_token_gate = threading.Event()
    key = await submit(mesh)
    await asyncio.to_thread(mesh.most_scored.wait, 20)
    await mesh.kill("rollout-0")
    await noted(mesh, "SERVICE_LOST")
    await asyncio.sleep(3.5)
    await mesh.replace("rollout-0")
    assert (await mesh.finished(key)).state is IterationState.DONE


async def test_an_iteration_that_waits_for_a_service_can_be_cancelled(mesh, monkeypatch):
    monkeypatch.setattr(ranks, "LOST_AFTER_S", 0.3)
    monkeypatch.setattr(peers, "JOIN_TIMEOUT_S", 0.3)
    await open_run(mesh)
    await mesh.kill("reference-0")
    key = await submit(mesh)
    await noted(mesh, "SERVICE_LOST")
    assert await asyncio.wait_for(mesh.coordinator.cancel(key), 10) is IterationState.CANCELLED
    await mesh.replace("reference-0")
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE


async def test_a_faulted_device_is_waited_for_until_its_process_has_ended(mesh):
    """The old process still answers for a moment; joining it would be the second loss."""
    def fault(context):
        raise InternalError("CUDA error: an illegal memory access", reason="DEVICE_FAULT", phase="suffix")

    mesh.trainer.hooks["train_suffix"] = fault
    await open_run(mesh)
    key = await submit(mesh)
    await noted(mesh, "SERVICE_LOST")
    await asyncio.sleep(0.3)
    former = mesh.trainer
    await mesh.kill("trainer-0")
    await mesh.replace("trainer-0")
    assert (await mesh.finished(key)).state is IterationState.DONE
    assert former.calls.count("train_suffix") == 1


@pytest.mark.parametrize("error", [
    OutOfMemory("no room", reason="OUT_OF_DEVICE_MEMORY"), WrongState("no", reason="GRADIENT_STAGE"), RuntimeError("a bug")])
async def test_what_would_fail_again_is_not_tried_again(mesh, error):
    def fail(context):
        raise error

    mesh.trainer.hooks["train_suffix"] = fail
    await open_run(mesh)
    failed = await mesh.finished(await submit(mesh))
    assert failed.state is IterationState.FAILED
    assert mesh.trainer.calls.count("train_suffix") == 1
    assert await notes(mesh, "SERVICE_LOST") == []


@pytest.mark.parametrize("lost", [True, False])
async def test_what_a_lost_service_still_holds_is_waited_out(mesh, lost):
    """A stopped process keeps its connection, and with it what it has reported, until it is ended."""
    await open_run(mesh)
    stopped = await asyncio.to_thread(BrokerSession.connect, mesh.trainer.mesh.address("broker"),
                                      mesh.trainer.mesh.handle_socket, process="rollout-9", role="rollout")
    if lost:
        Killer(mesh, mesh.rollout, "quiesce")
    enter, refused = mesh.coordinator.mesh.enter_phase, []

    async def ended_when_refused(run, iteration, phase, *needs):
        if phase is Phase.SUFFIX and not refused:
            kept = ResidencyEntry("rollout_kv", "rollout", "host:0", "hbm", 7, 7)
            await asyncio.to_thread(stopped.report_residency, [kept])
        try:
            await enter(run, iteration, phase, *needs)
        except InternalError as error:
            refused.append(error.reason)
            await asyncio.to_thread(stopped.close)
            raise

    mesh.coordinator.mesh.enter_phase = ended_when_refused
    ended = await mesh.finished(await submit(mesh))
    await asyncio.to_thread(stopped.close)
    assert refused == ["RESIDENCY_VIOLATED"]
    assert ended.state is (IterationState.DONE if lost else IterationState.FAILED)


@pytest.mark.parametrize("reason", ["HANDLE_SOCKET_DOWN", "BROKER_SILENT"])
async def test_a_broker_that_is_away_is_waited_for(mesh, reason):
    await open_run(mesh)
    session, asked = mesh.coordinator.mesh._session, []
    enter_phase = session.enter_phase

    def away_once(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            raise Unavailable("the connection was lost", reason=reason)
        return enter_phase(*arguments)

    session.enter_phase = away_once
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE
    lost, = await notes(mesh, "SERVICE_LOST")
    assert lost.startswith("broker was lost in OVERLAP")
    assert [phase.value for _, _, phase, *_ in asked] == ["overlap", "suffix", "suffix", "update", "suffix", "update", "idle"]


async def test_a_validation_survives_its_rollout(mesh):
    await open_run(mesh)
    killer = Killer(mesh, mesh.rollout, "generate")
    done = await mesh.finished(await submit(mesh, validation=True))
    assert (done.state, killer.died) == (IterationState.DONE, 1)
    assert len(await mesh.coordinator.samples(done.key)) == 4


# The coordinator itself

STOPS = [("rollout", "generate", 1), ("reference", "materialize_prefix", 1), ("reference", "score_suffix", 1),
         ("trainer", "materialize_prefix", 1), ("trainer", "score_suffix", 1), ("trainer", "train_suffix", 1),
         ("trainer", "measure_gradient", 1), ("trainer", "apply_update", 1), ("trainer", "materialize_prefix", 2),
         ("trainer", "train_suffix", 2), ("trainer", "measure_gradient", 2), ("trainer", "apply_update", 2),
         ("rollout", "bind_snapshot", 3), ("rollout", "bind_snapshot", 4)]


@pytest.mark.parametrize(("role", "method", "nth"), STOPS)
async def test_a_coordinator_that_is_replaced_anywhere_goes_on_with_the_iteration(mesh, role, method, nth):
    expected = await unfaulted(mesh)
    await open_run(mesh)
    engine, here, go_on = getattr(mesh, role), threading.Event(), threading.Event()

    def stop(context):
        if engine.calls.count(method) == nth and not here.is_set():
            here.set()
            go_on.wait(20)

    engine.hooks[method] = stop
    key = await submit(mesh)
    assert await asyncio.to_thread(here.wait, 20)
    restart = asyncio.create_task(mesh.restart())
    await asyncio.sleep(0.2)
    go_on.set()
    await restart
    done = await mesh.finished(key)
    assert (done.state, done.key, done.snapshot) == (IterationState.DONE, key, 0)
    run = mesh.coordinator.runs.get("run")
    assert (run.snapshot, run.optimizer_step, run.next_iteration) == (2, 2, 1)
    trained = reference_of(mesh.trainer.trained)
    assert [batch for index, batch in enumerate(trained) if batch not in trained[:index]] == expected
    assert {order.optimizer_step for order in mesh.trainer.orders[-4:] if not order.skip} <= {1, 2}
    assert len(mesh.scored) == 16
    if (role, method) not in (("rollout", "generate"), ("reference", "materialize_prefix"), ("trainer", "materialize_prefix")):
        assert set(mesh.scored.values()) == {1}
        assert mesh.rollout.calls.count("generate") == 1
    for name in ("reward", "critic/score/mean", "response_length/mean", "timing_s/step", "actor/grad_norm", "actor/lr"):
        assert name in done.metrics, name
    assert done.metrics["actor/grad_norm"] == 1.0
    resumed, = await notes(mesh, "RESUMED")
    assert "16 samples" in resumed or role == "rollout" or method == "materialize_prefix"
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE


async def test_what_a_replaced_coordinator_goes_on_with_can_be_cancelled_until_it_has_updated(mesh):
    await open_run(mesh)
    mesh.rollout.last_token_gate = threading.Event()
    key = await submit(mesh)
    await asyncio.sleep(0.2)
    await mesh.restart()
    assert await asyncio.wait_for(mesh.coordinator.cancel(key), 10) is IterationState.CANCELLED
    mesh.rollout.last_token_gate = None
    assert (await mesh.finished(await submit(mesh))).state is IterationState.DONE
    assert mesh.coordinator.runs.get("run").snapshot == 2


def test_every_loss_is_documented():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()
    assert [reason for reason in LOSSES if f"`{reason}`" not in text] == []
