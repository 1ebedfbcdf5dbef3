"""What vLLM is asked for, as plain data: the keyword arguments of `EngineArgs`. docs/vllm.md has the reasons that are long."""

from __future__ import annotations

from typing import Any

from rollplex.core.errors import BadInput
from rollplex.rollout.config import RolloutConfig

GIB = 1 << 30
CPU_BLOCK_TOKENS = 32
"""vLLM's own default of 128 lets no short prompt hit the prefix cache."""
_NO_COMPILATION = 0


def worker_processes(config: RolloutConfig) -> bool:
    """Whether vLLM's workers are other processes than the one that schedules: its own choice is so for several ranks only."""
    return config.rollout.vllm.worker_process or config.mesh.topology.rollout_tp > 1


def engine_options(config: RolloutConfig, max_tokens: int, *, on_gpu: bool) -> dict[str, Any]:
    """Everything but where weights come from. `max_tokens`: of a sequence. Raises BadInput for a type that vLLM does not
    compute in."""
    if config.model.dtype == "float64":
        raise BadInput("vLLM does not compute in float64; use model.dtype bfloat16 or float32, or rollout.engine torch",
                       reason="BAD_CONFIG")
    options = config.rollout.vllm
    return dict(
        **(_gpu_options if on_gpu else _cpu_options)(config, max_tokens),
        **({"distributed_executor_backend": "mp"} if worker_processes(config) else {}),
        model=str(config.model.checkpoint), dtype=config.model.dtype, seed=0,
        tensor_parallel_size=config.mesh.topology.rollout_tp,
        max_model_len=max_tokens, max_num_seqs=config.rollout.max_rows, enable_prefix_caching=True,
        # In bytes: what a neighbour on the device holds or frees meanwhile decides nothing.
        kv_cache_memory_bytes=int(options.kv_cache_gib * GIB), gpu_memory_utilization=options.gpu_memory_utilization,
        # The tower whole on every rank, as the slab has it; each medium is processed once, so nothing is worth caching.
        mm_encoder_tp_mode="data", mm_processor_cache_gb=0, skip_mm_profiling=True,
        # The log-probability of what was sampled: after temperature and forbidden tokens.
        logprobs_mode="processed_logprobs",
        # No sampling defaults from the checkpoint.
        generation_config="vllm", disable_log_stats=True)


def step_tokens(config: RolloutConfig, max_tokens: int, *, on_gpu: bool) -> int:
    """Tokens of one step, prompts' and samples' together."""
    # vLLM wants room for a token of every sample; a CPU computes a prompt whole.
    least = config.rollout.max_rows if on_gpu else max(config.rollout.max_rows, max_tokens)
    return max(config.rollout.vllm.max_num_batched_tokens, least)


def graph_sizes(max_rows: int) -> list[int]:
    """Batches for which a decode step is captured, ascending; a smaller batch runs as the next larger one.

    Each costs a fraction of a second of the start and a few MiB; a padded row costs no weight to be read again.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def _gpu_options(config: RolloutConfig, max_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_num_batched_tokens": step_tokens(config, max_tokens, on_gpu=True),
        # The next step is scheduled while this one runs.
        "async_scheduling": True,
        # Keys and values in memory that can be given back behind their addresses.
        "enable_sleep_mode": True,
        # A batch that shares one prompt would leave the decode graph.
        "disable_cascade_attn": True,
        "disable_custom_all_reduce": not config.rollout.vllm.custom_all_reduce,
    }
    if config.rollout.vllm.enforce_eager:
        return options | {"enforce_eager": True}
    # Decoding replays one graph a step. Nothing is compiled: that takes minutes and gains little once decode is bound by memory.
    compilation = {"mode": _NO_COMPILATION, "cudagraph_mode": "FULL_DECODE_ONLY",
                   "cudagraph_capture_sizes": graph_sizes(config.rollout.max_rows)}
    return options | {"compilation_config": compilation}


def _cpu_options(config: RolloutConfig, max_tokens: int) -> dict[str, Any]:
    # A prompt that is computed in parts draws from its generator before it should; vLLM then sets the generator back, which
    # a CPU's cannot do: "CPU Generator does not use offset". There a prompt is computed whole.
    return {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": CPU_BLOCK_TOKENS,
            "max_num_batched_tokens": step_tokens(config, max_tokens, on_gpu=False)}
