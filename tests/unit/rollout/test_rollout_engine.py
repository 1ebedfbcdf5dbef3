from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from rollplex.core import ids, work
from rollplex.core.config import AblationConfig, RunConfig
from rollplex.core.errors import BadInput, InternalError, WrongState
from rollplex.rollout.engine import ReplicaBroken, RolloutEngine, Tally

GROUPS = [work.PreparedGroup(index, array("q", [1, 2, 3]), prompt_hash=f"h{index}", sample_count=2, prompt_ordinal=40 + index)
          for index in range(2)]
SAMPLING = work.Sampling(1.0, 8, seed=3)


class Context:
    def __init__(self):
        self.handed, self.reports = [], []

    def samples(self, samples):
        self.handed.append(list(samples))

    def progress(self, done, total, unit):
        self.reports.append((done, total, unit))

    def check(self):
        pass


class Tokens:
    """A TokenEngine that answers with one token a sample and writes down what it was asked."""

    layout_facts = {"slab.dtype": "float32"}

    def __init__(self):
        self.log = []

    def open(self, run):
        self.log.append(("open", run))

    def bind(self, snapshot):
        if snapshot > 5:
            raise WrongState("no such snapshot")
        return 12, {"host:0": 99}

    def unbind(self):
        self.log.append("unbind")

    def release_kv(self):
        self.log.append("release_kv")
        return 17

    def generate(self, groups, sampling, tally):
        self.seeds = [seeded.seeds for seeded in groups]
        for seeded in groups:
            tally.prompt(seeded.group, seeded.group.prompt_hash)
            tally.finish([finished(seeded.group.group_index, sample) for sample in range(2)])


def finished(group, sample, reason="stop", count=1):
    return work.FinishedSample(group, sample, array("q", [7] * count), array("f", [0.0] * count), reason)


@pytest.fixture
def engine():
    return RolloutEngine(Tokens())


def opened(engine, run="run"):
    engine.open_run(Context(), run, 0, RunConfig(), False)
    return engine


def test_states(engine):
    with pytest.raises(WrongState):
        engine.bind_snapshot(Context(), 0)
    opened(engine)
    with pytest.raises(WrongState):
        engine.generate(Context(), GROUPS, SAMPLING, snapshot=0, iteration=0)
    assert engine.bind_snapshot(Context(), 3) == work.BindResult(3, 12, {"host:0": 99})
    with pytest.raises(WrongState):
        engine.bind_snapshot(Context(), 6)
    assert engine.bound_snapshot == 3
    assert engine.quiesce(Context(), False) == work.QuiesceResult(17)
    assert engine.bound_snapshot == 3
    engine.quiesce(Context(), True)
    assert engine.bound_snapshot == -1
    engine.bind_snapshot(Context(), 3)
    opened(engine, "another")
    assert engine.bound_snapshot == -1


@pytest.mark.parametrize("resident", [False, True])
def test_keys_and_values_go_after_a_generation_unless_the_run_keeps_them(engine, resident):
    config = RunConfig(ablation=AblationConfig(rollout_resident=resident))
    engine.open_run(Context(), "run", 0, config, False)
    engine.bind_snapshot(Context(), 0)
    engine.generate(Context(), GROUPS, SAMPLING, snapshot=0, iteration=0)
    assert engine._tokens.log.count("release_kv") == (not resident)
    assert engine.quiesce(Context(), False) == work.QuiesceResult(0 if resident else 17)
    before = engine._tokens.log.count("release_kv")
    engine.open_run(Context(), "another", 0, RunConfig(), False)
    assert engine._tokens.log.count("release_kv") - before == resident, "they were the former run's"


@pytest.mark.parametrize(("reason", "released"), [("DEVICE_FAULT", 0), ("NON_FINITE_LOGITS", 1)])
def test_after_a_device_has_failed_nothing_more_is_asked_of_it(engine, reason, released):
    opened(engine).bind_snapshot(Context(), 0)

    def fail(groups, sampling, tally):
        raise InternalError("no", reason=reason)

    engine._tokens.generate = fail
    with pytest.raises(InternalError):
        engine.generate(Context(), GROUPS, SAMPLING, snapshot=0, iteration=0)
    assert engine._tokens.log.count("release_kv") == released


def test_seeds_and_result(engine):
    opened(engine).bind_snapshot(Context(), 2)
    context = Context()
    result = engine.generate(context, GROUPS, SAMPLING, snapshot=2, iteration=6)
    assert (result.prompt_hashes, result.prompt_tokens, result.response_tokens) == (("h0", "h1"), 6, 4)
    assert context.reports == [(1, 2, "groups"), (2, 2, "groups")]
    assert [len(batch) for batch in context.handed] == [2, 2]
    expected = [[ids.sample_seed(3, 6, 40 + group, sample) for sample in range(2)] for group in range(2)]
    assert np.array_equal(np.array(engine._tokens.seeds), np.array(expected, dtype=np.uint64))


def test_aborted_samples_count_as_tokens_but_not_as_done():
    context = Context()
    tally = Tally(context, GROUPS)
    tally.finish([finished(0, 0), finished(0, 1, "aborted", 3)])
    tally.finish([])
    assert (tally.response_tokens, tally.done_count, context.reports, len(context.handed)) == (4, 0, [], 1)


def test_a_wrong_group_is_refused_before_anything_runs(engine):
    opened(engine).bind_snapshot(Context(), 0)
    empty = SimpleNamespace(group_index=5, sample_count=0)
    for groups in ([GROUPS[0], empty], [GROUPS[0], GROUPS[0]]):
        with pytest.raises(BadInput) as caught:
            engine.generate(Context(), groups, SAMPLING, snapshot=0, iteration=0)
        assert caught.value.metadata["group_index"] == str(groups[1].group_index)
    assert not hasattr(engine._tokens, "seeds")


def test_a_broken_replica_is_bound_to_nothing(engine):
    def generate(*_):
        raise ReplicaBroken("rank 1 was killed")

    opened(engine).bind_snapshot(Context(), 2)
    engine._tokens.generate = generate
    with pytest.raises(ReplicaBroken):
        engine.generate(Context(), GROUPS, SAMPLING, snapshot=2, iteration=0)
    assert (engine.open_run_name, engine.bound_snapshot, engine._tokens.log[-1]) == ("run", -1, "unbind")
