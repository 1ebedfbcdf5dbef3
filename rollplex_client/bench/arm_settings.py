"""The configuration of an arm's mesh: sized from the job, then what --config and --set say."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from rollplex.core.hbm_shares import GRADIENT_KEYS, REFERENCE_KEYS, engine_plan
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import Choice, Plan
from rollplex.core.memory_sizes import GIB, PlanInput, Work
from rollplex.core.strict import apply_overrides, read_toml
from rollplex.core.topology import Topology
from rollplex_client.bench.arms import Arm
from rollplex_client.bench.job import Job
from rollplex_client.cli.settings import Settings, merge, parse_settings

KV_BLOCK_TOKENS = 16
"""vLLM's; every sample may leave one block half empty, and copies the last one of its prompt."""
KV_MARGIN = 1.05
RUNTIME_BYTES = 8 * GIB
"""Contexts of three processes and what engines hold beside the ledger's classes."""
GPU_THREADS = 4
"""CPU threads of an engine that reads frames for a GPU."""


def arm_settings(job: Job, arm: Arm, runtime_dir: Path, arguments: argparse.Namespace, hbm_bytes: int) -> Settings:
    """A rollplex.toml that happens to lie about is not read."""
    tables = arm_tables(job, arm, runtime_dir, hbm_bytes)
    given = read_toml(arguments.config) if arguments.config else {}
    return parse_settings(apply_overrides(merge(tables, given), arguments.overrides))


def arm_tables(job: Job, arm: Arm, runtime_dir: Path, hbm_bytes: int) -> dict[str, Any]:
    """`hbm_bytes`: of one GPU; not read on a CPU."""
    on_gpu = job.device == "cuda"
    run = job.run_config(arm.schedule)
    mesh: dict[str, Any] = {"runtime_dir": str(runtime_dir)}
    if arm.schedule == "disaggregated":
        mesh["own_replicas"] = 1
    rows = job.groups * job.samples
    rollout: dict[str, Any] = {"engine": "torch", "max_rows": rows}
    trainer: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    if on_gpu:
        engines = {"threads": GPU_THREADS}
        mesh |= {"devices": "cuda", "sharing": arm.policy}
        longest = job.prompt_tokens + job.max_response
        rollout = {"engine": "vllm", "max_rows": rows, "threads": GPU_THREADS, "vllm": {
            "sample_generators": False, "kv_cache_gib": kv_cache_gib(job),
            "max_model_len": -(-longest // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS}}
        # One plan for all arms: with other activations kept, more than the schedule would differ.
        choice = gpu_plan(job, hbm_bytes).choice
        run |= {"saved_activations": choice.activations, "suffix_activations": choice.suffix_activations}
        trainer, reference = ({**engines, "gradients": GRADIENT_KEYS[choice.gradients]},
                              {**engines, "weights": REFERENCE_KEYS[choice.reference]})
    else:
        run["saved_activations"] = "recompute"
    workers = max(1, min(job.groups, len(os.sched_getaffinity(0)) // 2))
    return {
        "mesh": mesh, "run": run, "rollout": rollout, "trainer": trainer, "reference": reference,
        "model": {"checkpoint": str(job.checkpoint), "dtype": "bfloat16" if on_gpu else "float32",
                  "max_prompt_tokens": job.prompt_tokens},
        "coordinator": {"media_roots": [str(job.media_root)], "media": dict(job.workload["media"]), "builtin_reward": "",
                        "decode_workers": workers}}


def kv_cache_gib(job: Job) -> float:
    """All samples of the largest iteration at once, a group's prompt once; at least one sequence of full length."""
    blocks = 2 * KV_BLOCK_TOKENS * job.groups * job.samples
    tokens = max(sum(group.prompt.tokens + sum(group.lengths) for group in job.work(iteration))
                 for iteration in range(job.iterations)) + blocks
    tokens = max(tokens, job.prompt_tokens + job.max_response + blocks)
    return math.ceil(100 * KV_MARGIN * tokens * job.model.kv_token_bytes(job.item_bytes) / GIB) / 100


def gpu_plan(job: Job, hbm_bytes: int) -> Plan:
    """Where an overlapping iteration's classes fit on one GPU, of what the engines offer."""
    lengths = [sum(row) for iteration in range(job.iterations) for row in job.lengths(iteration)]
    return engine_plan(PlanInput(
        shapes=job.model.shapes, topology=Topology(1, 1), gpus=1, hbm_bytes=hbm_bytes,
        host_bytes=default_host_limit_bytes(), runtime_bytes=RUNTIME_BYTES, schedule="overlap", reference=job.kl_coef > 0,
        work=Work(groups=job.groups, samples=job.samples, prompt_tokens=job.prompt_tokens,
                  response_tokens=max(1, -(-max(lengths) // job.samples)), micro_batch_samples=job.samples)), Choice())
