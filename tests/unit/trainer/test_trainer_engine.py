"""The engine's commands over a broker that is a dict: exactness across ways of computing, order, refusals."""

import math
from array import array
from dataclasses import replace

import pytest
import torch
from tiny_trainer import QUIET, DictBroker, gradients, make_groups, run_config, scale_of, train
from transformers import AutoModelForImageTextToText

from rollplex.core.config import AblationConfig, SamplingConfig
from rollplex.core.errors import Aborted, BadInput, NotFound, WrongState
from rollplex.core.ids import actor_slab, state_slab
from rollplex.core.work import LossScale, PreparedGroup, ResponseGroup, UpdateOrder
from rollplex.model import load_into

ACTOR = actor_slab("run", "host:0")


@pytest.fixture
def opened(build_engine):
    """opened(dtype, **run_config) -> engine with a run open and snapshot 0 bound."""
    def build(dtype=torch.float64, broker=None, **fields):
        engine = build_engine(broker or DictBroker(), dtype)
        engine.open_run(QUIET, "run", -1, run_config(**fields), False)
        engine.bind_snapshot(QUIET, 0)
        return engine

    return build


def assert_gradients_close(found, expected, tolerance):
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 1e-6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance * largest, msg=lambda m, n=name: f"{n}: {m}")


def test_open_run_makes_slabs_and_loads_the_checkpoint(build_engine, checkpoint):
    broker = DictBroker()
    engine = build_engine(broker, torch.float32)
    result = engine.open_run(QUIET, "run", -1, run_config(), False)
    assert (result.actor_slab, result.snapshot) == (ACTOR, 0)
    assert result.actor_bytes == broker.slabs[ACTOR][0].size_bytes
    hf = AutoModelForImageTextToText.from_pretrained(checkpoint)
    padding = (192 - 160) * 32 * 2
    assert result.parameter_count == sum(p.numel() for p in hf.parameters()) + padding
    classes = {slab.name.rpartition("/")[2]: slab.object_class for slab in broker.list_slabs("runs/run/trainer-0/")}
    assert classes == {"optimizer": "optimizer_state", "flips": "optimizer_state", "gradients": "gradients"}
    bound = engine.bind_snapshot(QUIET, 0)
    assert bound.bound_parameters == len(engine._model.layout.tensors)
    views = {name: torch.empty_like(value) for name, value in engine._model.parameters_by_name().items()}
    load_into(checkpoint, engine._model.config, views)
    assert all(torch.equal(views[name], value) for name, value in engine._model.parameters_by_name().items())


def test_a_new_run_deletes_what_the_rank_left(build_engine):
    broker = DictBroker()
    engine = build_engine(broker)
    engine.open_run(QUIET, "first", -1, run_config(), False)
    engine.open_run(QUIET, "second", -1, run_config(), False)
    assert {name.split("/")[1] for name in broker.slabs} == {"second"}


def test_attach_needs_a_run_that_was_loaded(build_engine, monkeypatch):
    broker = DictBroker()
    engine = build_engine(broker)
    with pytest.raises(NotFound):
        engine.open_run(QUIET, "run", 0, run_config(), True)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr("rollplex.trainer.actor_slabs.load_into", lambda *_, **__: (_ for _ in ()).throw(OSError("disk")))
        engine.open_run(QUIET, "run", -1, run_config(), False)
    with pytest.raises(WrongState, match="never finished"):
        engine.open_run(QUIET, "run", 0, run_config(), True)
    assert engine.open_run_name == ""


def test_gradient_lands_in_the_slab(opened):
    broker = DictBroker()
    engine = opened(broker=broker)
    train(engine, *make_groups())
    slab = torch.frombuffer(bytearray(broker.bytes_of(state_slab("run", 0, "gradients"))), dtype=torch.float64)
    norm = engine.measure_gradient(QUIET)
    assert norm.finite and norm.grad_norm == pytest.approx(float(slab.norm()), rel=1e-12)
    assert all(p.grad.data_ptr() == engine._state.gradients.views[n].data_ptr()
               for n, p in engine._model.parameters_by_name().items())


@pytest.mark.parametrize("fields", [
    {"suffix_micro_batch_samples": 1}, {"suffix_micro_batch_samples": 3}, {"suffix_micro_batch_samples": 8},
    {"suffix_micro_batch_samples": 8, "suffix_activations": "recompute"}, {"saved_activations": "recompute"},
    {"saved_activations": "offload"}, {"saved_activations": "from_inputs"}, {"suffix_activations": "recompute"},
], ids=str)
def test_ways_of_computing_agree(opened, fields):
    """float64; sums in another order differ by 1e-16 an operation, so 1e-12 of the largest entry leaves ample room."""
    prompts, responses = make_groups()
    expected_metrics = train(engine := opened(), prompts, responses).metrics
    expected = gradients(engine)
    engine = opened(**fields)
    metrics = train(engine, prompts, responses).metrics
    assert_gradients_close(gradients(engine), expected, 1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-12)


def test_keep_recompute_and_offload_are_bit_identical_in_float32(opened):
    found = []
    for mode in ("keep", "recompute", "offload"):
        engine = opened(torch.float32, saved_activations=mode)
        train(engine, *make_groups())
        found.append(engine._state.gradients.flat.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_suffixes_kept_or_recomputed_are_bit_identical(opened):
    """In every dtype, and with less in the account."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found, peaks = [], []
        for mode in ("keep", "recompute"):
            broker = DictBroker()
            engine = opened(dtype, broker=broker, suffix_activations=mode)
            train(engine, *make_groups())
            found.append(engine._state.gradients.flat.clone())
            peaks += [entry.peak_bytes for entry in broker.reported if entry.object_class == "suffix_activations"]
        assert found[0].any() and torch.equal(*found), dtype
        assert 0 < peaks[1] < peaks[0] / 2, peaks


@pytest.mark.parametrize(("micro_batch_samples", "order"), [(0, [2, 1, 0]), (8, [4, 3, 2, 1, 0]), (8, [0, 2, 1, 4, 3])], ids=str)
def test_splitting_a_mini_batch_into_calls_and_reordering_groups_changes_nothing(opened, micro_batch_samples, order):
    """Calls end where packs do."""
    prompts, responses = make_groups(count=len(order))
    engine = opened(torch.float32, suffix_micro_batch_samples=micro_batch_samples)
    train(engine, prompts, responses)
    expected = engine._state.gradients.flat.clone()
    hashes = engine.materialize_prefix(QUIET, prompts).prompt_hashes
    again = engine.materialize_prefix(QUIET, [prompts[index] for index in order]).prompt_hashes
    assert len(set(hashes)) > 1 and again == tuple(hashes[index] for index in order)
    scored = engine.score_suffix(QUIET, [responses[index] for index in order], temperature=1.0, keep_boundaries=True).samples
    assert [sample.group_index for sample in scored[::4]] == order
    first = engine._config.groups_per_pass
    engine.train_suffix(QUIET, responses[:first], scale_of(responses))
    engine.train_suffix(QUIET, [responses[index] for index in order if index >= first], scale_of(responses))
    assert torch.equal(engine._state.gradients.flat, expected)


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
@pytest.mark.parametrize("left_out", [[], [1], [0, 3, 4]])
def test_a_pack_leaves_nothing_behind_whoever_of_it_is_trained(opened, saved, left_out):
    prompts, responses = make_groups(count=5)
    kept = [index for index in range(5) if index not in left_out]
    engine = opened(saved_activations=saved, suffix_micro_batch_samples=8)
    train(engine, prompts, [responses[index] for index in kept])
    found = gradients(engine)
    # Of a pack that is left out whole all is there until the mini-batch has ended.
    assert (engine.quiesce(QUIET, False).released_bytes > 0) == (4 in left_out)
    assert engine._prefixes.boundary_bytes == engine._prefixes.saved_bytes == 0
    assert engine._pool is None or engine._pool.used_bytes == 0
    alone = opened()
    train(alone, [prompts[index] for index in kept], [responses[index] for index in kept])
    assert_gradients_close(found, gradients(alone), 1e-12)


@pytest.mark.parametrize("command", ["materialize_prefix", "score_suffix", "train_suffix"])
def test_a_group_twice_in_a_command_is_refused(opened, command):
    prompts, responses = make_groups(count=2)
    engine = opened(suffix_micro_batch_samples=8)
    engine.materialize_prefix(QUIET, prompts)
    twice, options = [*responses, responses[1]], {"temperature": 1.0, "keep_boundaries": True}
    with pytest.raises(BadInput, match=r"groups \[1\] are there more than once"):
        {"materialize_prefix": lambda: engine.materialize_prefix(QUIET, [*prompts, prompts[1]]),
         "score_suffix": lambda: engine.score_suffix(QUIET, twice, **options),
         "train_suffix": lambda: engine.train_suffix(QUIET, twice, scale_of(responses))}[command]()
    # Nothing was touched.
    engine.train_suffix(QUIET, responses, scale_of(responses))


def test_what_is_released_cannot_be_read_any_more(opened):
    """The account has it as gone."""
    prompts, _ = make_groups(count=2)
    engine = opened(suffix_micro_batch_samples=8)
    engine.materialize_prefix(QUIET, prompts)
    boundary = engine._prefixes.ready.get(0).boundary
    engine._prefixes.ready.release([1])
    assert engine._prefixes.boundary_bytes == engine._prefixes.saved_bytes == 0
    with pytest.raises(WrongState, match="released"):
        boundary.leaves()


def test_an_unscored_sample_adds_nothing_but_counts(opened):
    prompts, responses = make_groups(count=1)
    samples = responses[0].samples
    hidden = ResponseGroup(0, (*samples[:2], replace(samples[2], scored=False, advantage=5.0), samples[3]))
    zeroed = ResponseGroup(0, (*samples[:2], replace(samples[2], advantage=0.0), samples[3]))
    engine = opened()
    metrics = train(engine, prompts, [hidden]).metrics
    found = gradients(engine)
    train(engine, prompts, [zeroed])
    assert_gradients_close(found, gradients(engine), 1e-14)
    assert metrics["actor/sample_count"] == 3
    none = ResponseGroup(0, tuple(replace(sample, scored=False) for sample in samples))
    assert train(engine, prompts, [none]).metrics == {}
    assert not engine._state.gradients.flat.any()


@pytest.mark.parametrize("micro_batch_samples", [3, 8])
def test_scored_old_log_probabilities_give_ratio_one(opened, micro_batch_samples):
    engine = opened(torch.float32, suffix_micro_batch_samples=micro_batch_samples)
    prompts, responses = make_groups(count=3)
    engine.materialize_prefix(QUIET, prompts)
    scored = iter(engine.score_suffix(QUIET, responses, temperature=1.0, keep_boundaries=True).samples)
    old = [ResponseGroup(group.group_index, tuple(replace(sample, old_logprobs=next(scored).logprobs)
                                                  for sample in group.samples)) for group in responses]
    metrics = engine.train_suffix(QUIET, old, scale_of(old)).metrics
    assert metrics["actor/ppo_kl"] == 0.0
    with_old = engine._state.gradients.flat.clone()
    train(engine, prompts, responses)
    assert torch.equal(with_old, engine._state.gradients.flat)


@pytest.mark.parametrize("name", ["no_state_offload", "unchunked_optimizer", "rollout_resident", "no_weight_sharing"])
def test_ablations_move_bytes_and_change_no_update(opened, name):
    found = {}
    for ablation in (AblationConfig(), AblationConfig(**{name: True})):
        broker = DictBroker()
        engine = opened(torch.float32, broker=broker, ablation=ablation)
        train(engine, *make_groups())
        engine.measure_gradient(QUIET)
        engine.quiesce(QUIET, True)
        result = engine.apply_update(QUIET, UpdateOrder(1, 1.0, 1.0, 1))
        states = {slab.device for slab in broker.list_slabs() if slab.name.endswith("optimizer")}
        found[ablation.any] = (result.chunk_count, states, broker.bytes_of(engine._actor.own.slab))
    assert found[True][2] == found[False][2] and found[False][1] == {"host"} and found[False][0] > 1
    assert found[True][0] == (1 if name == "unchunked_optimizer" else found[False][0])
    assert found[True][1] == {"host:0" if name == "no_state_offload" else "host"}


def test_temperature_is_the_runs(opened):
    prompts, responses = make_groups(count=1)
    cold = opened(sampling=SamplingConfig(samples_per_group=4, temperature=0.5, max_response_tokens=16))
    cold.materialize_prefix(QUIET, prompts)
    scored = cold.score_suffix(QUIET, responses, temperature=0.5, keep_boundaries=True).samples
    metrics = cold.train_suffix(QUIET, [ResponseGroup(0, tuple(
        replace(sample, rollout_logprobs=one.logprobs) for sample, one in zip(responses[0].samples, scored)))],
        scale_of(responses)).metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5


def test_non_finite_gradient_is_reported_and_skipped(opened):
    broker = DictBroker()
    engine = opened(torch.float32, broker=broker)
    train(engine, *make_groups())
    engine._state.gradients.flat[5] = math.nan
    result = engine.measure_gradient(QUIET)
    assert not result.finite and math.isnan(result.grad_norm)
    before = [broker.bytes_of(name) for name in broker.slabs if not name.endswith("gradients")]
    skipped = engine.apply_update(QUIET, UpdateOrder(0, 1.0, 1.0, 1, skip=True))
    assert skipped.chunk_count == 0
    assert before == [broker.bytes_of(name) for name in broker.slabs if not name.endswith("gradients")]
    assert not engine._state.gradients.flat.any()
    assert engine.bound_snapshot == 0
    train(engine, *make_groups())
    assert engine.measure_gradient(QUIET).finite


def test_order_of_commands_is_enforced(opened, build_engine):
    prompts, responses = make_groups()
    engine = build_engine(DictBroker())
    with pytest.raises(WrongState, match="no run"):
        engine.materialize_prefix(QUIET, prompts)
    engine = opened()
    with pytest.raises(WrongState, match=r"no boundary of groups \[0, 1\]"):
        engine.train_suffix(QUIET, responses, scale_of(responses))
    with pytest.raises(WrongState, match="measure it"):
        engine.apply_update(QUIET, UpdateOrder(1, 1.0, 1.0, 1))
    train(engine, prompts, responses)
    with pytest.raises(WrongState, match="no boundary"):
        engine.train_suffix(QUIET, responses, scale_of(responses))
    engine.measure_gradient(QUIET)
    with pytest.raises(WrongState, match="measured"):
        engine.train_suffix(QUIET, responses, scale_of(responses))
    with pytest.raises(WrongState, match="run 'other'"):
        engine.require("other")
    with pytest.raises(WrongState, match="snapshot 3; bound is 0"):
        engine.require("run", 3)
    engine.quiesce(QUIET, True)
    with pytest.raises(WrongState, match="no snapshot"):
        engine.materialize_prefix(QUIET, prompts)


def test_a_restart_does_not_measure_half_a_gradient(opened, build_engine):
    broker = DictBroker()
    engine = opened(torch.float32, broker=broker)
    prompts, responses = make_groups()
    train(engine, prompts, responses)
    expected = engine._state.gradients.flat.clone()
    engine.materialize_prefix(QUIET, prompts)
    engine.train_suffix(QUIET, responses[:1], scale_of(responses))
    engine = build_engine(broker, torch.float32)
    engine.open_run(QUIET, "run", 0, run_config(), True)
    engine.bind_snapshot(QUIET, 0)
    with pytest.raises(WrongState, match="earlier process"):
        engine.measure_gradient(QUIET)
    train(engine, prompts, responses)
    assert torch.equal(engine._state.gradients.flat, expected)


class _Aborting:
    """Aborts when asked for the second time."""

    aborted = False

    def __init__(self):
        self.asked = 0

    def progress(self, *_): ...

    def check(self):
        self.asked += 1
        if self.asked > 1:
            raise Aborted("enough")


def test_an_aborted_iteration_can_be_run_again(opened):
    engine = opened(torch.float32)
    prompts, responses = make_groups()
    train(engine, prompts, responses)
    expected = engine._state.gradients.flat.clone()
    with pytest.raises(Aborted):
        engine.materialize_prefix(_Aborting(), prompts)
    engine.materialize_prefix(QUIET, prompts)
    with pytest.raises(Aborted):
        engine.train_suffix(_Aborting(), responses, scale_of(responses))
    engine.quiesce(QUIET, False)
    train(engine, prompts, responses)
    assert torch.equal(engine._state.gradients.flat, expected)


def test_an_aborted_update_is_finished_by_the_same_order(opened):
    results = []
    for interrupt in (False, True):
        broker = DictBroker()
        engine = opened(torch.float32, broker=broker)
        train(engine, *make_groups())
        engine.measure_gradient(QUIET)
        order = UpdateOrder(1, 1.0, 1.0, 1)
        if interrupt:
            with pytest.raises(Aborted):
                engine.apply_update(_Aborting(), order)
            engine.bind_snapshot(QUIET, 0)
            with pytest.raises(WrongState, match="half applied"):
                engine.materialize_prefix(QUIET, [])
            with pytest.raises(WrongState, match="half applied"):
                engine.apply_update(QUIET, replace(order, skip=True))
        engine.apply_update(QUIET, order)
        results.append(broker.bytes_of(ACTOR))
    assert results[0] == results[1]


@pytest.mark.parametrize(("change", "message"), [
    ({"advantage": math.nan}, "advantage nan"),
    ({"rollout_logprobs": array("f", [0.0])}, "1 rollout_logprobs"),
    ({"rollout_logprobs": None}, "some samples only"),
    ({"token_ids": array("q"), "rollout_logprobs": array("f")}, "empty"),
    ({"token_ids": array("q", [160]), "rollout_logprobs": array("f", [0.0])}, "vocabulary of 160"),
])
def test_bad_responses_are_refused(opened, change, message):
    engine = opened()
    prompts, responses = make_groups(count=1)
    samples = responses[0].samples
    engine.materialize_prefix(QUIET, prompts)
    with pytest.raises(BadInput, match=message):
        engine.train_suffix(QUIET, [ResponseGroup(0, (*samples[:3], replace(samples[3], **change)))], scale_of(responses))


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_residency_is_reported_and_given_back(opened, mode):
    broker = DictBroker()
    engine = opened(torch.float32, broker=broker, saved_activations=mode)
    prompts, responses = make_groups()
    prefix = engine.materialize_prefix(QUIET, prompts)
    held = {(entry.object_class, entry.residency): entry.size_bytes for entry in broker.reported}
    tokens = sum(len(prompt.token_ids) - 1 for prompt in prompts)
    assert held["boundary_trainer", "hbm"] == prefix.boundary_bytes == tokens * 2 * 2 * 16 * 4
    assert prefix.saved_bytes > 0
    assert (held.get(("prefix_activations", "pinned"), 0) > 0) == (mode == "offload")
    engine.train_suffix(QUIET, responses, scale_of(responses))
    entries = {entry.object_class: entry for entry in broker.reported}
    assert all(entry.size_bytes == 0 for entry in entries.values())
    assert entries["suffix_activations"].peak_bytes > 0


def test_one_token_prompt_trains(opened):
    engine = opened()
    _, responses = make_groups(count=1)
    train(engine, [PreparedGroup(0, array("q", [7]), sample_count=4)], responses)
    assert engine.measure_gradient(QUIET).grad_norm > 0


def test_export_is_what_transformers_loads(opened, tmp_path):
    engine = opened(torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    result = engine.export_checkpoint(QUIET, out)
    assert result.size_bytes == sum(file.stat().st_size for file in out.iterdir())
    hf = AutoModelForImageTextToText.from_pretrained(out)
    head = engine._model.parameters_by_name()["lm_head.weight"]
    assert torch.equal(hf.lm_head.weight, head[:160])
    with pytest.raises(BadInput, match="not an empty directory"):
        engine.export_checkpoint(QUIET, out)


def test_a_scale_of_nothing_is_refused(opened):
    engine = opened()
    prompts, responses = make_groups(count=1)
    engine.materialize_prefix(QUIET, prompts)
    with pytest.raises(BadInput, match="sample_count is 0"):
        engine.train_suffix(QUIET, responses, LossScale(0, 0, 0))
