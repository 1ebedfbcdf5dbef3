"""What is run before the first command: every step of an iteration's forward and backward passes, and nothing of it stays."""

from __future__ import annotations

import gc

import pytest
import torch

from rollplex.core.config import ModelSection
from rollplex.model import VisionLanguageModel, prefix, prefix_forward, read_model_config, suffix_forward, warmup
from rollplex.model.warmup import one_rank, rehearse, two_layers, warm_up

CPU = torch.device("cpu")
FAILURES = {"torch.float32": torch.OutOfMemoryError("no room"), "torch.bfloat16": AssertionError("no room")}
"""By the dtype that is asked for: torch's compiler also fails with what is no RuntimeError."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("trains", "steps"), [
    (True, ["prefix", "suffix", "suffix backward", "prefix backward"]), (False, ["prefix", "score"])])
def test_an_iteration_of_two_layers(checkpoints, single_rank, trains, steps, dtype):
    config = read_model_config(checkpoints[False])
    modes = []
    for step in rehearse(config, dtype, CPU, trains=trains):
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert step == steps[len(modes) - 1]
    assert modes == [(True, False)] * len(steps), "no mode of ours is the caller's"
    gc.collect()
    assert not any(isinstance(found, VisionLanguageModel) and found.config.vocab_size == two_layers(config).vocab_size
                   for found in gc.get_objects())


@pytest.mark.parametrize("trains", [True, False])
def test_weights_take_gradients_as_the_engines_own_do(checkpoints, single_rank, monkeypatch, trains):
    """Kernels are compiled for one or the other, also where no gradient is asked for: the reference's first prompt would
    compile its norms again."""
    seen = []

    def watched(model, *arguments):
        seen.append({parameter.requires_grad for parameter in model.parameters()})
        return prefix_forward(model, *arguments)

    monkeypatch.setattr(warmup, "prefix_forward", watched)
    list(rehearse(read_model_config(checkpoints[False]), torch.float32, CPU, trains=trains))
    assert seen == [{trains}]


def test_widths_are_the_models_own(checkpoints):
    config = read_model_config(checkpoints[True])
    small = two_layers(config)
    assert (small.layer_count, small.vision.depth) == (2, 2)
    for name in ("hidden_size", "intermediate_size", "head_count", "kv_head_count", "head_size", "mrope_section"):
        assert getattr(small, name) == getattr(config, name)
    assert small.vision.hidden_size == config.vision.hidden_size
    assert config.vision.depth == 3, "the model's config is untouched"


def test_blocks_run_as_in_any_saved_mode(checkpoints, single_rank, monkeypatch):
    """For weights that take a gradient, without a graph and with one, kernels are others."""
    modes, attend = [], prefix.causal_over

    def watched(token_counts):
        modes.append(torch.is_grad_enabled())
        return attend(token_counts)

    monkeypatch.setattr(prefix, "causal_over", watched)
    list(rehearse(read_model_config(checkpoints[False]), torch.float32, CPU, trains=True))
    assert modes == [False, True]


def test_a_rank_warms_up_for_its_share(checkpoints, single_rank, monkeypatch):
    """Down to one kv head, for which torch compiles kernels of their own."""
    config = read_model_config(checkpoints[False])
    heads = []

    def watched(model, boundaries, *rest):
        heads.extend(boundary.layers[0][0].shape[1] for boundary in boundaries)
        return suffix_forward(model, boundaries, *rest)

    monkeypatch.setattr(warmup, "suffix_forward", watched)
    for ranks in (1, config.kv_head_count):
        list(rehearse(one_rank(config, ranks), torch.float32, CPU, trains=True))
    assert heads == [config.kv_head_count, 1]


@pytest.fixture
def steps(monkeypatch, caplog):
    """A GPU's warm-up of made-up steps; those that ran."""
    caplog.set_level("INFO", logger=warmup.__name__)
    ran: list[int] = []

    def made_up(*arguments, **options):
        for step in range(3):
            ran.append(step)
            yield str(step)
            if step == 1 and options["trains"]:
                raise FAILURES[str(arguments[1])]

    monkeypatch.setattr(warmup, "rehearse", made_up)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: ran.append(-1))
    return ran


def test_it_is_for_gpus(checkpoints, steps):
    section = ModelSection(checkpoint=checkpoints[False])
    warm_up(section.checkpoint, section.dtype, "host:0", lambda: False, trains=True)
    assert steps == []
    warm_up(section.checkpoint, section.dtype, "cuda:0", lambda: False, trains=False)
    assert steps == [0, 1, 2, -1]


def test_it_stops_when_the_engine_does(checkpoints, steps, caplog):
    warm_up(checkpoints[False], "float32", "cuda:0", lambda: True, trains=False)
    assert steps == [0, -1]
    assert "kernels compiled" not in caplog.text


@pytest.mark.parametrize(("dtype", "failure"), [("float32", "OutOfMemoryError"), ("bfloat16", "AssertionError")])
def test_what_fails_is_told_and_left_for_the_first_use(checkpoints, steps, caplog, dtype, failure):
    warm_up(checkpoints[False], dtype, "cuda:0", lambda: False, trains=True)
    assert steps == [0, 1, -1]
    assert f"kernels will be compiled at their first use: {failure}: no room" in caplog.text
    assert "kernels compiled" not in caplog.text
