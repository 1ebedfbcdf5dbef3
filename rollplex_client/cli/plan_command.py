"""plan: whether a model, a group of GPUs and an iteration fit together, by object class and phase."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rollplex.core.config import AblationConfig
from rollplex.core.hbm_shares import as_toml, engine_plan, plan_keys
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import Choice, Plan, advice, make_plan
from rollplex.core.memory_sizes import GIB, PlanInput, Work
from rollplex.core.naive_overlap import UNDETERMINED, NaiveRow, naive_overlap
from rollplex.core.topology import Topology
from rollplex_client.cli.output import FAILED, Output
from rollplex_client.cli.plan_tables import choice_text, naive_table, nominal_text, phase_table, verdict_text
from rollplex_client.cli.published import model_shapes


def plan(arguments: argparse.Namespace, output: Output) -> int:
    """Exit status 1 when it does not fit."""
    given = plan_input(arguments)
    wanted = Choice(arguments.gradients, arguments.reference, arguments.activations, arguments.suffix_activations)
    if arguments.toml:
        return plan_as_toml(given, wanted, output)
    found, naive = make_plan(given, wanted), naive_overlap(given)
    tips = advice(found, wanted)
    output.result(as_json(found, naive, tips), "Naive overlap, nothing shared, released or parked (GiB per GPU)",
                  naive_table(naive), nominal_text(found), *(f"  {name}: {why}" for name, why in UNDETERMINED.items()), "",
                  f"Rollplex, {given.schedule} (GiB; HBM per GPU, host per node)", phase_table(found), choice_text(found),
                  verdict_text(found), *(f"  change {tip}" for tip in tips))
    return 0 if found.fits else FAILED


def plan_as_toml(given: PlanInput, wanted: Choice, output: Output) -> int:
    """The part of a configuration that makes the plan so; on stdout alone, so that it can be a file. Status 1, and why on stderr,
    when nothing that the engines offer fits."""
    found = engine_plan(given, wanted)
    if not found.fits:
        output.note(verdict_text(found))
        for tip in advice(found, wanted):
            output.note(f"  change {tip}")
        return FAILED
    keys = plan_keys(found)
    print(json.dumps(keys) if output.json else as_toml(keys), end="\n" if output.json else "")
    return 0


def plan_input(arguments: argparse.Namespace) -> PlanInput:
    host_bytes = default_host_limit_bytes() if arguments.host_gib is None else round(arguments.host_gib * GIB)
    return PlanInput(
        shapes=model_shapes(arguments.model), topology=Topology(arguments.train_tp, arguments.rollout_tp),
        gpus=arguments.gpus, rollout_gpus=arguments.rollout_gpus, hbm_bytes=round(arguments.hbm_gib * GIB),
        host_bytes=host_bytes, runtime_bytes=round(arguments.runtime_gib * GIB), schedule=arguments.schedule,
        train_layout=arguments.train_layout, data_parallel=arguments.data_parallel, reference=not arguments.no_reference,
        freeze_vision=arguments.freeze_vision,
        moments_dtype=arguments.moments, ablation=AblationConfig(**dict.fromkeys(arguments.ablate, True)),
        work=Work(groups=arguments.groups, samples=arguments.samples, prompt_tokens=arguments.prompt_tokens,
                  response_tokens=arguments.response_tokens, micro_batch_samples=arguments.micro_batch_samples,
                  chunk_elements=arguments.chunk_elements))


def as_json(found: Plan, naive: list[NaiveRow], tips: list[str]) -> dict[str, Any]:
    return {"fits": found.fits, "hbm_bytes": found.given.hbm_bytes, "host_limit_bytes": found.given.host_bytes,
            "hbm_over_bytes": found.hbm_over, "host_over_bytes": found.host_over, "kv_share": found.kv_share,
            "choice": dataclasses.asdict(found.choice) | {"moments": found.given.moments_dtype},
            "phases": {column.name: {"total_bytes": column.total, "bytes": column.hbm} for column in found.columns},
            "host": {"total_bytes": found.host_total, "bytes": found.host},
            "naive_overlap": [dataclasses.asdict(row) | {"undetermined": UNDETERMINED.get(row.component)} for row in naive],
            "naive_total_bytes": sum(row.size_bytes for row in naive), "change": tips}
