"""The trainer runs blocks of a prefix on the stream that it is given, and nothing else."""

import pytest
import torch
from noted_stream import NotedStream
from tiny_trainer import QUIET, DictBroker, gradients, make_groups, run_config, scale_of


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_only_prefix_blocks_run_on_it(build_engine, saved):
    prompts, responses = make_groups(count=2)
    found, streams = [], [None, NotedStream()]
    for stream in streams:
        engine = build_engine(DictBroker(), torch.float64, prefix_stream=stream)
        engine.open_run(QUIET, "run", -1, run_config(saved_activations=saved), False)
        engine.bind_snapshot(QUIET, 0)
        prefix = engine.materialize_prefix(QUIET, prompts)
        assert prefix.boundary_bytes > 0
        # Two groups through two decoder layers: text has no vision blocks.
        assert stream is None or stream.entered == 4
        # A graph that is gone back through on the stream needs it; nothing else after the prefixes may pay for it.
        assert stream is None or stream.open == (saved == "keep")
        engine.train_suffix(QUIET, responses, scale_of(responses))
        found.append((prefix.saved_bytes, gradients(engine)))
    assert streams[1].entered == 4
    # With `from_inputs` the prompts themselves, and nothing else: int64 tokens and three axes of positions.
    prompt_bytes = sum(4 * 8 * len(prompt.token_ids) for prompt in prompts)
    assert all((saved_bytes == prompt_bytes) == (saved == "from_inputs") and saved_bytes > 0 for saved_bytes, _ in found)
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


@pytest.mark.parametrize("end", ["quiesce", "close"])
def test_a_graph_that_was_kept_on_it_holds_it_no_longer_than_the_boundaries(build_engine, end):
    prompts, _ = make_groups(count=1)
    stream = NotedStream()
    engine = build_engine(DictBroker(), torch.float64, prefix_stream=stream)
    engine.open_run(QUIET, "run", -1, run_config(saved_activations="keep"), False)
    engine.bind_snapshot(QUIET, 0)
    engine.materialize_prefix(QUIET, prompts)
    assert stream.open
    if end == "quiesce":
        engine.quiesce(QUIET, False)
    else:
        build_engine(DictBroker(), torch.float64)
    assert not stream.open
