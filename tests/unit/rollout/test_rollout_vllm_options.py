"""What vLLM is asked for on a CPU and on a GPU; vLLM itself is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.errors import BadInput
from rollplex.rollout.config import RolloutConfig, RolloutSection, VllmSection
from rollplex.rollout.vllm_options import engine_options, graph_sizes, step_tokens

CONFIG = RolloutConfig(model=ModelSection(checkpoint=Path("/c"), dtype="bfloat16"), mesh=MeshSection(runtime_dir=Path("/r")),
                       rollout=RolloutSection(engine="vllm", max_rows=256, vllm=VllmSection(kv_cache_gib=60.5)))


def with_vllm(**changes) -> RolloutConfig:
    return replace(CONFIG, rollout=replace(CONFIG.rollout, vllm=replace(CONFIG.rollout.vllm, **changes)))


@pytest.mark.parametrize("rows", [1, 3, 8, 12, 63, 64, 256, 300, 1024])
def test_every_batch_has_a_graph(rows):
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows
    assert len(sizes) < 24 + rows // 32
    assert all(min(size for size in sizes if size >= batch) < 2 * batch for batch in range(1, rows + 1))


def test_a_gpu_decodes_with_graphs_and_schedules_ahead():
    options = engine_options(CONFIG, 5000, on_gpu=True)
    assert options["kv_cache_memory_bytes"] == int(60.5 * 2**30)
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert options["compilation_config"]["cudagraph_capture_sizes"][-1] == options["max_num_seqs"] == 256
    assert (options["async_scheduling"], options["enable_sleep_mode"]) == (True, True)
    assert "enforce_eager" not in options
    assert options["disable_custom_all_reduce"] is False
    assert engine_options(with_vllm(custom_all_reduce=False), 5000, on_gpu=True)["disable_custom_all_reduce"] is True
    # Chunked prefill: a step need not hold the longest sequence.
    assert options["max_num_batched_tokens"] == 8192
    eager = engine_options(with_vllm(enforce_eager=True), 5000, on_gpu=True)
    assert eager["enforce_eager"] is True
    assert "compilation_config" not in eager


def test_a_cpu_computes_prompts_whole_and_has_no_graphs():
    options = engine_options(CONFIG, 20000, on_gpu=False)
    assert options["enforce_eager"] is True
    assert options["enable_chunked_prefill"] is False
    assert options["max_num_batched_tokens"] == 20000
    assert not {"compilation_config", "enable_sleep_mode", "async_scheduling"} & options.keys()


def test_a_worker_is_a_process_of_its_own_on_request():
    for on_gpu in (True, False):
        assert "distributed_executor_backend" not in engine_options(CONFIG, 5000, on_gpu=on_gpu)
        asked = engine_options(with_vllm(worker_process=True), 5000, on_gpu=on_gpu)
        assert asked["distributed_executor_backend"] == "mp"


def test_a_step_has_room_for_a_token_of_every_sample():
    few = with_vllm(max_num_batched_tokens=64)
    assert step_tokens(few, 5000, on_gpu=True) == 256
    assert step_tokens(few, 5000, on_gpu=False) == 5000


def test_what_vllm_does_not_compute_in_is_refused():
    with pytest.raises(BadInput):
        engine_options(replace(CONFIG, model=replace(CONFIG.model, dtype="float64")), 5000, on_gpu=True)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        VllmSection(max_num_batched_tokens=0)
