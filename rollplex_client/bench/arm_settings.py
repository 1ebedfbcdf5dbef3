"""The configuration of an arm's mesh: sized from the job, then what --config and --set say."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from rollplex.core.hbm_shares import GRADIENT_KEYS, REFERENCE_KEYS, engine_plan
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import KNOWN, Choice, Plan
from rollplex.core.memory_sizes import GIB, PlanInput, Work
from rollplex.core.strict import apply_overrides, read_toml
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


COLLECTIVE_TIMEOUT_S = 300.0
"""Of a GPU's ranks: in the first iteration each compiles kernels while others wait."""


def arm_settings(job: Job, arms: list[Arm], arm: Arm, runtime_dir: Path, arguments: argparse.Namespace, hbm_bytes: int
                 ) -> Settings:
    """Of one of `arms`. `hbm_bytes`: of one GPU. A rollplex.toml that happens to lie about is not read."""
    host_bytes = None if arguments.host_gib is None else round(arguments.host_gib * GIB)
    if arguments.hbm_gib is not None:
        hbm_bytes = min(hbm_bytes, round(arguments.hbm_gib * GIB))
    tables = arm_tables(job, arms, arm, runtime_dir, hbm_bytes, host_bytes)
    if arguments.hbm_gib is not None:
        tables["mesh"] |= {"hbm_budget_gib": arguments.hbm_gib, "hbm_runtime_gib": RUNTIME_BYTES / GIB}
    given = read_toml(arguments.config) if arguments.config else {}
    return parse_settings(apply_overrides(merge(tables, given), arguments.overrides))


def arm_tables(job: Job, arms: list[Arm], arm: Arm, runtime_dir: Path, hbm_bytes: int, host_bytes: int | None = None
               ) -> dict[str, Any]:
    """`hbm_bytes`: of one GPU; not read on a CPU. `host_bytes`: what slabs may take of the node; None: by its limits."""
    on_gpu = job.device == "cuda"
    run = job.run_config(arm.schedule)
    topology = arm.topology
    mesh: dict[str, Any] = {
        "runtime_dir": str(runtime_dir), "train_tensor_parallel": arm.train_tp, "rollout_tensor_parallel": arm.rollout_tp,
        "reference_tensor_parallel": arm.train_tp, "own_replicas": arm.own_replicas, "data_parallel": arm.data_parallel}
    rows = -(-job.groups // topology.replica_count) * job.samples
    rollout: dict[str, Any] = {"engine": "torch", "max_rows": rows}
    trainer: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    if on_gpu:
        engines = {"threads": GPU_THREADS}
        mesh |= {"devices": "cuda", "sharing": arm.policy, "collective_timeout_s": COLLECTIVE_TIMEOUT_S}
        longest = job.prompt_tokens + job.max_response
        rollout = {"engine": "vllm", "max_rows": rows, "threads": GPU_THREADS, "vllm": {
            "sample_generators": False, "kv_cache_gib": kv_cache_gib(job, arm),
            "max_model_len": -(-longest // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS}}
        # One choice for all arms: with other activations kept, more than the schedule would differ.
        choice = common_choice([gpu_plan(job, each, hbm_bytes, host_bytes) for each in arms])
        run |= {"saved_activations": choice.activations, "suffix_activations": choice.suffix_activations}
        trainer, reference = ({**engines, "gradients": GRADIENT_KEYS[choice.gradients]},
                              {**engines, "weights": REFERENCE_KEYS[choice.reference]})
    else:
        run["saved_activations"] = "recompute"
    workers = max(1, min(job.groups, len(os.sched_getaffinity(0)) // 2))
    return {
        "mesh": mesh, "run": run, "rollout": rollout, "trainer": trainer, "reference": reference,
        "broker": {} if host_bytes is None else {"host_limit_bytes": host_bytes},
        "model": {"checkpoint": str(job.checkpoint), "dtype": "bfloat16" if on_gpu else "float32",
                  "max_prompt_tokens": job.prompt_tokens},
        "coordinator": {"media_roots": [str(job.media_root)], "media": dict(job.workload["media"]), "builtin_reward": "",
                        "decode_workers": workers}}


def kv_cache_gib(job: Job, arm: Arm) -> float:
    """Of a GPU: all samples of a replica's largest iteration at once, a group's prompt once; at least one sequence of full
    length. Replicas take groups in turn."""
    replicas = arm.topology.replica_count
    blocks = 2 * KV_BLOCK_TOKENS * -(-job.groups // replicas) * job.samples
    tokens = blocks + max(
        sum(group.prompt.tokens + sum(group.lengths) for group in job.work(iteration)[replica::replicas])
        for iteration in range(job.iterations) for replica in range(replicas))
    tokens = max(tokens, job.prompt_tokens + job.max_response + blocks)
    return math.ceil(100 * KV_MARGIN * tokens * job.model.kv_token_bytes(job.item_bytes, arm.rollout_tp) / GIB) / 100


def gpu_plan(job: Job, arm: Arm, hbm_bytes: int, host_bytes: int | None = None) -> Plan:
    """Where an iteration's classes fit, of what the engines offer: an overlapping one's, for `serial` too."""
    lengths = [sum(row) for iteration in range(job.iterations) for row in job.lengths(iteration)]
    topology = arm.topology
    return engine_plan(PlanInput(
        shapes=job.model.shapes, topology=topology, gpus=arm.train_tp, data_parallel=arm.data_parallel, hbm_bytes=hbm_bytes,
        rollout_gpus=topology.replica_count * arm.rollout_tp,
        host_bytes=default_host_limit_bytes() if host_bytes is None else host_bytes, runtime_bytes=RUNTIME_BYTES,
        schedule="disaggregated" if arm.own_replicas else "overlap", reference=job.kl_coef > 0,
        work=Work(groups=job.groups, samples=job.samples, prompt_tokens=job.prompt_tokens,
                  response_tokens=max(1, -(-max(lengths) // job.samples)),
                  micro_batch_samples=job.micro_batch_samples or job.samples)), Choice())


def common_choice(plans: list[Plan]) -> Choice:
    """Of each class the most frugal place that any of the plans needs."""
    return Choice(**{name: max((getattr(plan.choice, name) for plan in plans), key=known.index)
                     for name, known in KNOWN.items()})
