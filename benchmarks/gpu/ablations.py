"""The paper's Figure 8: under an HBM budget that full Rollplex keeps, each ablation is refused with the ledger's table.

    PYTHONPATH=services:protos/gen:. python benchmarks/gpu/ablations.py --shape 3b --kl-coef 0.04 --out OUT [as rollplex bench]

The budget lies halfway between what the coordinator's own planner says of the full run and of the ablation that needs least. One
mesh, a run each: the full one does its iterations, and its peak is read from NVML; each ablated one has to end at a refusal. What
a plan would choose anew under a smaller budget is held fixed (CHOICES, those that need least). `--plan` stops after the plans,
which needs no GPU; `--device cpu --shape tiny` tries every step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from rollplex.coordinator.planner import Planner
from rollplex.core.config import AblationConfig, RunConfig
from rollplex.core.errors import RollplexError
from rollplex.core.memory_sizes import GIB
from rollplex.core.shapes import read_shapes
from rollplex.core.strict import parse, to_plain
from rollplex_client import Client
from rollplex_client.bench.arm_settings import arm_settings
from rollplex_client.bench.arms import DEFAULT_POLICY, TIME_SLICE, Arm
from rollplex_client.bench.facts import origin
from rollplex_client.bench.gpu_memory import watch_memory
from rollplex_client.bench.job import Job, check_numbers, make_job
from rollplex_client.bench.measure import ledger_peaks
from rollplex_client.bench.run_arm import REWARD_NAME, _served_reward
from rollplex_client.cli.arguments import build_parser
from rollplex_client.cli.bench_command import build
from rollplex_client.cli.fit import engine_choices
from rollplex_client.cli.mesh import bring_up, stop_timeout_s
from rollplex_client.cli.settings import Settings, merged

ABLATIONS = tuple(field.name for field in fields(AblationConfig))
CHOICES = {"mesh": {"hbm_runtime_gib": 8.0}, "trainer": {"gradients": "hbm"}, "reference": {"weights": "paged"},
           "run": {"saved_activations": "from_inputs", "suffix_activations": "recompute"}}
LARGE = 1 << 40
TINY = {"run": {"saved_activations": "recompute",
                "optimizer": {"chunk_elements": 1 << 12, "vision_learning_rate": 0.0, "projector_learning_rate": 0.0}}}
"""Of the default chunk the tiny model is one, ablated or not; and plans leave out the patches that a tower in training keeps,
which are more than all else of a model so small."""


def run_config(settings: Settings, **ablation: bool) -> RunConfig:
    return parse(RunConfig, to_plain(settings.run) | {"ablation": ablation})


def planned(job: Job, settings: Settings) -> dict[str, dict[str, Any]]:
    """Name ("full" or an ablation) -> the phase that needs most of the device, and its bytes by class."""
    planner = Planner(settings.mesh, read_shapes(job.checkpoint), settings.sections["model"].dtype)
    found = {}
    for name in ("full", *ABLATIONS):
        config = run_config(settings, **({} if name == "full" else {name: True}))
        plan = planner.needs(config, [job.prompt_tokens] * job.groups, engine_choices(settings.sections), generates=True,
                             trains=True).plan
        found[name] = {"phase": plan.peak.name, "total_bytes": plan.peak.total, "bytes": plan.peak.hbm}
    return found


def halfway(plans: dict[str, dict[str, Any]]) -> int:
    full, least = plans["full"]["total_bytes"], min(plans[name]["total_bytes"] for name in ABLATIONS)
    if least <= full:
        raise SystemExit(f"an ablation needs {least:,} bytes, full Rollplex {full:,}: no budget tells them apart")
    return (full + least) // 2


def attempt(client: Client, job: Job, name: str, config: RunConfig, iterations: int) -> list[dict[str, Any]]:
    """Iterations of a new run: seconds and memory of each. Raises what refuses it."""
    run, done = client.create_run(name, config).name, []
    for _ in range(iterations):
        ended = client.wait(client.submit_iteration(run, job.prompts()))
        done.append({"step_s": ended.metrics["timing_s/step"], "state": ended.state})
    return done


def measure(job: Job, settings: Settings, result: dict[str, Any], keep: Any) -> bool:
    """Whether the full run did its iterations within the budget and every ablation was refused."""
    supervisor = bring_up(settings, timeout_s=300.0)
    well = True
    try:
        with _served_reward(settings.mesh.runtime_dir) as address, Client(settings.coordinator_address) as client:
            client.register_reward(REWARD_NAME, address)
            with watch_memory(job.device) as memory:
                done = attempt(client, job, "full", run_config(settings), job.iterations)
            result["full"] = {"iterations": done, "hbm_peak_bytes": ledger_peaks(client.mesh().ledger_peaks),
                              "gpu_memory": {"before_bytes": memory.before_bytes, "peak_bytes": memory.peak_bytes}}
            keep(result)
            if memory.peak_bytes is not None:
                # What others on this GPU held before is not the mesh's.
                well &= memory.peak_bytes <= result["budget_bytes"]
            for name in ABLATIONS:
                try:
                    done = attempt(client, job, f"without-{name.replace('_', '-')}", run_config(settings, **{name: True}), 1)
                    result["ablated"][name] = {"refused": False, "iterations": done}
                    well = False
                except RollplexError as error:
                    memory_said = error.reason in ("PHASE_OVER_BUDGET", "OUT_OF_DEVICE_MEMORY")
                    well &= memory_said
                    result["ablated"][name] = {"refused": memory_said, "reason": error.reason, "message": str(error)}
                keep(result)
                print(f"{name}: {json.dumps(result['ablated'][name])}", flush=True)
    finally:
        supervisor.shut_down(stop_timeout_s(settings))
    return well


def main() -> int:
    only_plan = "--plan" in sys.argv
    given = [word for word in sys.argv[1:] if word != "--plan"]
    arguments: argparse.Namespace = build_parser().parse_args(["bench", *given])
    check_numbers(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    job = make_job(arguments, build(arguments))
    arm = Arm("overlap", DEFAULT_POLICY["overlap"] if job.device == "cuda" else TIME_SLICE)
    with tempfile.TemporaryDirectory(prefix="rpb-") as folder:
        settings = merged(arm_settings(job, [arm], arm, Path(folder) / "rt", arguments, LARGE), CHOICES)
        if arguments.shape == "tiny" and not arguments.model:
            settings = merged(settings, TINY)
        plans = planned(job, settings)
        budget_gib = halfway(plans) / GIB
        settings = merged(settings, {"mesh": {"hbm_budget_gib": budget_gib}})
        result: dict[str, Any] = {"origin": origin(), "job": job.plain(), "planned": plans,
                                  "budget_bytes": settings.mesh.hbm_budget_bytes, "full": None, "ablated": {}}

        def keep(result: dict[str, Any]) -> None:
            (arguments.out / "ablations.json").write_text(json.dumps(result, indent=1, default=str) + "\n")

        keep(result)
        for name, plan in plans.items():
            print(f"{name:<22} {plan['total_bytes'] / GIB:9.3f} GiB in {plan['phase']}")
        print(f"{'budget':<22} {budget_gib:9.3f} GiB", flush=True)
        return 0 if only_plan or measure(job, settings, result, keep) else 1


if __name__ == "__main__":
    sys.exit(main())
