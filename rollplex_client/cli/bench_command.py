"""bench: one job, one node, one go."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from rich.markup import escape

from rollplex.core.errors import BadInput, InternalError, RollplexError
from rollplex_client.bench.arm_settings import arm_settings
from rollplex_client.bench.arms import Arm, by_mesh, check_gpus, parse_arms
from rollplex_client.bench.facts import origin, probe_hardware
from rollplex_client.bench.job import Job, check_numbers, make_job
from rollplex_client.bench.measure import arm_result, equation_rows
from rollplex_client.bench.page import write_page
from rollplex_client.bench.run_arm import ArmRun, bench_mesh, check_same_job, check_updated, run_arm
from rollplex_client.bench.tables import summary_lines
from rollplex_client.bench.trl import run_trl, trl_result
from rollplex_client.cli.bench_arguments import ARMS
from rollplex_client.cli.mesh_commands import health_display
from rollplex_client.cli.output import FAILED, Output
from rollplex_client.cli.settings import Settings
from rollplex_client.formatting import seconds_text

CPU_ARMS = "serial,overlap"
DEFAULT_HBM_BYTES = 1 << 40
"""Of a CPU, where nothing is placed by it."""


def bench(arguments: argparse.Namespace, output: Output) -> int:
    """Exit status 1 when an arm or TRL failed; what the others measured is written all the same."""
    arms = parse_arms(arguments.arms or (ARMS if arguments.device == "cuda" else CPU_ARMS), arguments.device,
                      train_tp=arguments.train_tp, rollout_tp=arguments.rollout_tp, gpus=arguments.gpus)
    check_numbers(arguments)
    hardware = probe_hardware(arguments.device)
    check_gpus(arms, arguments.device, hardware["gpus"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    built = build(arguments)
    job = make_job(arguments, built)
    output.note(f"checkpoint in {seconds_text(built['checkpoint_s'])}, videos in {seconds_text(built['videos_s'])}: "
                f"{job.groups} prompts of {job.prompt_tokens} tokens, {job.workload['media_tokens']} of them video")
    result: dict[str, Any] = {"origin": origin(), "hardware": hardware, "job": job.plain(), "build": {
        key: built[key] for key in ("weight_bytes", "checkpoint_s", "videos_s")}, "arms": [], "equation": {}, "trl": None,
        "failed": []}
    runs = _run_arms(job, arms, arguments, hardware, result, output)
    if arguments.vs == "trl":
        try:
            _run_trl(job, arguments, result, output)
        except RollplexError as error:
            _failed(result, "trl", error, output)
    write(arguments.out, result)
    page = write_page(arguments.out / "report.html", result)
    # Messages of failures may hold what the console would take for markup.
    output.result({**result, "report": str(page)}, *map(escape, summary_lines(result)),
                  f"\n{arguments.out / 'bench.json'}, {page}")
    return FAILED if result["failed"] or not (runs or result["trl"]) else 0


def build(arguments: argparse.Namespace) -> dict[str, Any]:
    """Checkpoint and videos, in a process of its own that has the GPU for itself. Raises InternalError, BadInput."""
    what = ["--checkpoint", str(arguments.model)] if arguments.model else ["--shape", arguments.shape]
    command = [sys.executable, "-m", "rollplex.bench", "--out", str(arguments.work), *what, "--prompt-tokens",
               str(arguments.prompt_tokens), "--groups", str(arguments.groups), "--seed", str(arguments.seed), "--device",
               arguments.device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "ValueError" in last or "BadInput" in last:
            raise BadInput(f"rollplex.bench: {last}", reason="BAD_JOB")
        raise InternalError(f"rollplex.bench ended with status {done.returncode}: {last}", reason="BENCH_BUILD_FAILED")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _run_arms(job: Job, arms: list[Arm], arguments: argparse.Namespace, hardware: dict[str, Any], result: dict[str, Any],
              output: Output) -> list[ArmRun]:
    runs: list[ArmRun] = []
    for alike in by_mesh(arms):
        waiting = deque(alike)
        while waiting:
            try:
                _run_alike(job, arms, waiting, runs, arguments, hardware, result, output)
            except RollplexError as error:
                # A mesh in which an arm failed is not measured any further.
                what = str(waiting.popleft()) if waiting else f"the end of {alike[-1]}'s mesh"
                _failed(result, what, error, output)
                write(arguments.out, result)
    return runs


def _run_alike(job: Job, arms: list[Arm], waiting: deque[Arm], runs: list[ArmRun], arguments: argparse.Namespace,
               hardware: dict[str, Any], result: dict[str, Any], output: Output) -> None:
    """Takes arms from `waiting` as they are done, on one mesh. Raises what the first of those that are left fails with."""
    # Sockets' paths must be short, --out's may not be.
    folder = arguments.runtime_dir or Path(tempfile.mkdtemp(prefix="rpb-"))
    runtime_dir, hbm_bytes = folder / waiting[0].run_name, hardware.get("hbm_bytes", DEFAULT_HBM_BYTES)

    def settings_of(arm: Arm) -> Settings:
        return arm_settings(job, arms, arm, runtime_dir, arguments, hbm_bytes)

    logs = arguments.out / "logs" / "+".join(map(str, waiting))
    try:
        with health_display(output) as on_health, bench_mesh(
                job, waiting[0].gpus, settings_of(waiting[0]), logs, timeout_s=arguments.timeout, on_health=on_health) as mesh:
            while waiting:
                run = run_arm(job, waiting[0], mesh, settings_of(waiting[0]), output)
                check_updated(run)
                check_same_job([*runs[:1], run])
                runs.append(run)
                result["arms"].append(arm_result(job, run, hardware))
                result["equation"] = equation_rows(runs)
                waiting.popleft()
                # After every arm: a machine may be taken away at any time.
                write(arguments.out, result)
    finally:
        if not arguments.runtime_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _run_trl(job: Job, arguments: argparse.Namespace, result: dict[str, Any], output: Output) -> None:
    output.note("TRL: the same job")
    measured = run_trl(job, arguments.out / "trl", arguments.trl_batch, arguments.trl_vllm_share, arguments.trl_vllm,
                       arguments.trl_timeout)
    result["trl"] = trl_result(job, measured, result["arms"], result["hardware"])


def _failed(result: dict[str, Any], name: str, error: RollplexError, output: Output) -> None:
    """A failure is part of the result."""
    output.note(f"{name} failed: {error}")
    result["failed"].append({"what": name, "reason": error.reason, "message": str(error)})


def write(folder: Path, result: dict[str, Any]) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return path
