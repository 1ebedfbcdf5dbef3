"""Epochs, validations, refusals and summaries."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from canned_run import canned_history

from rollplex.core.errors import Aborted, BadInput, Unavailable, WrongState
from rollplex_client import Prompt
from rollplex_client.cli import loop
from rollplex_client.cli.loop import Plan, ReplayLoop, TrainingLoop
from rollplex_client.cli.progress import Silent
from rollplex_client.cli.shuffled_reward import ValueShuffler
from rollplex_client.results import Iteration, IterationHandle, Run
from rollplex_client.summary import compare_overlap, phase_seconds, summary

PROMPTS = [Prompt.text(str(index)) for index in range(10)]


def plan(**keys) -> Plan:
    return Plan(**({"run": "r", "prompts": PROMPTS, "iterations": 5, "groups_per_iteration": 4} | keys))


def test_an_epoch_holds_every_row_once_in_a_seeded_order():
    order = [position for iteration in range(5) for position in plan().batch(iteration)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:] != list(range(10))
    assert order == [position for iteration in range(5) for position in plan().batch(iteration)]
    assert plan(seed=1).batch(0) != plan().batch(0)
    assert plan(shuffle=False).batch(2) == [8, 9, 0, 1]


def test_more_groups_than_rows_are_refused():
    with pytest.raises(BadInput, match="only 10 usable rows"):
        plan(groups_per_iteration=11)


class Recording:
    """A client whose iterations end at once; it refuses prompts whose text is in `bad`."""

    def __init__(self, bad: set[str] = frozenset(), failures: Sequence[str] = ()) -> None:
        self.bad, self.log, self.failures = bad, [], list(failures)
        self.request_ids: list[str] = []

    def submit_iteration(self, run, groups, *, request_id):
        self.request_ids.append(request_id)
        if self.failures and self.failures[0] == "submit":
            self.failures.pop(0)
            raise Unavailable("restarting")
        return self._submit("train", groups)

    def submit_validation(self, run, groups, *, request_id):
        return self._submit("validate", groups)

    def _submit(self, what, groups):
        texts = [group.messages[0]["content"][0]["text"] for group in groups]
        refused = [index for index, text in enumerate(texts) if text in self.bad]
        if refused:
            raise BadInput(f"{len(refused)} of {len(texts)} prompts are refused. prompt {refused[0]}: broken",
                           reason="MEDIA_EMPTY", indices=",".join(map(str, refused)))
        self.log.append((what, texts))
        return IterationHandle("r", len(self.log), what == "validate", 0)

    def wait(self, handle, on_event=None):
        if self.failures and self.failures[0] == "wait":
            self.failures.pop(0)
            raise Aborted("trainer-0 was restarted while it worked", reason="ENGINE_RESTARTED")
        return Iteration("r", handle.iteration, handle.validation, "done", 0, {}, None, None, None)


def run_at(next_iteration: int) -> Run:
    return Run("r", "active", {}, 0, next_iteration, None, 0)


def test_validations_come_before_the_first_every_m_and_after_the_last():
    client = Recording()
    TrainingLoop(client, plan(heldout=PROMPTS[:2], validate_every=2), Silent()).train(run_at(0))
    assert [what for what, _ in client.log] == ["validate", "train", "train", "validate", "train", "train", "validate",
                                                "train", "validate"]


def test_a_run_that_was_interrupted_goes_on_where_it_was():
    whole, rest = Recording(), Recording()
    TrainingLoop(whole, plan(), Silent()).train(run_at(0))
    TrainingLoop(rest, plan(), Silent()).train(run_at(3))
    assert rest.log == whole.log[3:]


def test_refused_prompts_end_a_run_unless_they_may_be_left_out():
    with pytest.raises(BadInput):
        TrainingLoop(Recording({"3"}), plan(), Silent()).train(run_at(0))
    client = Recording({"3", "7"})
    TrainingLoop(client, plan(), Silent(), filter_bad=True).train(run_at(0))
    trained = [text for _, texts in client.log for text in texts]
    assert len(client.log) == 5
    assert not {"3", "7"} & set(trained)
    assert {"0", "9"} <= set(trained)


def test_refused_rows_are_named_by_their_number_in_the_file():
    seen = Refusals()
    rows = [100 + index for index in range(10)]
    with pytest.raises(BadInput, match=r"^row 103: broken; row 104: refused as others are \(MEDIA_EMPTY\)$"):
        TrainingLoop(Recording({"3", "4"}), plan(rows=rows, shuffle=False, groups_per_iteration=6), seen).train(run_at(0))
    loop_ = TrainingLoop(Recording({"1"}), plan(rows=rows, heldout=PROMPTS[:2]), seen, filter_bad=True)
    loop_.train(run_at(0))
    assert [(item.row, item.reason) for item in seen.items] == [("held-out row 1", "broken"), ("row 101", "broken")]


def test_an_iteration_of_refused_prompts_takes_those_that_follow():
    client = Recording({"0", "1", "2", "3"})
    TrainingLoop(client, plan(shuffle=False, groups_per_iteration=2), Silent(), filter_bad=True).train(run_at(0))
    assert [texts for _, texts in client.log] == [["4", "5"]] * 3 + [["6", "7"], ["8", "9"]]
    everything = {str(index) for index in range(10)}
    with pytest.raises(BadInput, match="no usable row is left, 10 are refused; row 0: broken"):
        TrainingLoop(Recording(everything), plan(shuffle=False), Silent(), filter_bad=True).train(run_at(0))


class Refusals(Silent):
    def __init__(self) -> None:
        self.items = []

    def on_refused(self, refusals):
        self.items += refusals


def test_an_iteration_is_repeated_when_a_service_is_lost_under_it(monkeypatch):
    monkeypatch.setattr(loop, "RETRY_PAUSE_S", 0.0)
    client = Recording(failures=["submit", "wait", "wait"])
    TrainingLoop(client, plan(iterations=2), Silent()).train(run_at(0))
    assert [texts for _, texts in client.log] == [client.log[0][1]] * 3 + [client.log[3][1]]
    assert client.request_ids[0] == client.request_ids[1]
    assert len(set(client.request_ids)) == 4
    with pytest.raises(Aborted):
        TrainingLoop(Recording(failures=["wait"] * 3), plan(), Silent()).train(run_at(0))


class Replaying(Recording):
    """A mesh on which `left` recorded iterations are not replayed yet."""

    def __init__(self, left: int, **keys) -> None:
        super().__init__(**keys)
        self.left = left

    def replay_iteration(self, run, *, request_id):
        if not self.left:
            raise WrongState("all of them are replayed", reason="REPLAY_ENDED")
        self.left -= 1
        self.log.append(("replay", []))
        return IterationHandle("r", len(self.log), False, 0)


@pytest.mark.parametrize(("left", "iterations", "replayed"), [(3, 5, 3), (3, 2, 2), (0, 5, 0)])
def test_a_replay_ends_with_the_recording_or_the_plan(left, iterations, replayed):
    client = Replaying(left)
    ReplayLoop(client, Plan("r", [], iterations=iterations), Silent()).train(run_at(0))
    assert client.log == [("replay", [])] * replayed


def test_a_replayed_iteration_is_repeated_when_a_service_is_lost_under_it():
    client = Replaying(3, failures=["wait"])
    ReplayLoop(client, Plan("r", [], iterations=2), Silent()).train(run_at(0))
    assert client.left == 0


def test_summary_takes_the_ends_of_the_run():
    facts = summary(canned_history(), 95.0)
    assert facts["iterations"] == 30
    assert facts["accuracy_last5"] - facts["accuracy_first5"] > 0.25
    assert facts["heldout_first"] == 0.36 < facts["heldout_last"]
    assert facts["phase_s"]["step"] == pytest.approx(2.25)
    assert phase_seconds(canned_history("serial"))["gen"] == pytest.approx(1.0)


def test_equation_one_from_serial_and_overlap():
    found = compare_overlap(canned_history("serial").iterations[1:3], canned_history().iterations[1:3])
    assert (found.decode_s, found.prefix_s) == (pytest.approx(1.0), pytest.approx(0.65))
    assert found.predicted_s == pytest.approx(1.0 + 2.8 - 1.65)
    assert found.measured_s == pytest.approx(2.25)
    assert compare_overlap([], []) is None


def test_shuffled_values_are_the_same_values_but_say_nothing():
    source = random.Random(5)
    values = [source.choice([1.0, 2.0]) for _ in range(4000)]
    shuffler = ValueShuffler(0)
    out = [value for start in range(0, 4000, 5) for value in shuffler.shuffle(values[start:start + 5])]
    assert len(out) == 4000
    assert sum(out) / 4000 == pytest.approx(sum(values) / 4000, abs=0.03)
    agreement = sum(a == b for a, b in zip(values[500:], out[500:])) / 3500
    assert agreement == pytest.approx(0.5, abs=0.04)
    assert ValueShuffler(1).shuffle(values[:64]) == ValueShuffler(1).shuffle(values[:64])
