"""A mesh comes up, does the job's iterations once an arm, and goes down."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.errors import DataLoss, InternalError
from rollplex_client.bench.arms import Arm
from rollplex_client.bench.gpu_memory import MemoryWatch, watch_memory
from rollplex_client.bench.job import Job
from rollplex_client.cli.mesh import OnHealth, bring_up, last_lines, stop_timeout_s
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import Settings
from rollplex_client.formatting import seconds_text
from rollplex_client.history import RunHistory, read_history
from rollplex_client.results import Iteration
from rollplex_client.sync import Client

REWARD = "rollplex_client.bench.reward:count_reward"
REWARD_NAME = "count"


@dataclass(frozen=True)
class ArmRun:
    """What an arm has done."""

    arm: Arm
    history: RunHistory
    lengths: list[list[list[int]]]
    """Sampled tokens of every iteration, group and sample."""
    first_samples: str
    """SHA-256 of the first iteration's tokens."""
    start_s: float
    """To an open run: from nothing, or from a mesh that an earlier arm has left."""
    wall_s: list[float]
    """From the end of one iteration to the end of the next, for all but the first."""
    memory: MemoryWatch
    config: dict[str, Any]
    """The mesh's effective configuration."""


@dataclass
class BenchMesh:
    """One that serves, with the benchmark's reward."""

    client: Client
    before_bytes: int | None
    """Of GPU memory in use before it came up."""
    up_s: float
    """That it took, until an arm has counted it."""


@contextlib.contextmanager
def bench_mesh(job: Job, gpus: int, settings: Settings, logs: Path, *, timeout_s: float, on_health: OnHealth | None = None
               ) -> Iterator[BenchMesh]:
    """For arms that differ in their schedule. Raises what bringing up a mesh raises; logs are kept either way."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with watch_memory(job.device, gpus) as memory:
            before_bytes = memory.before_bytes
        stack.callback(_keep_logs, settings.mesh.runtime_dir, logs)
        supervisor = bring_up(settings, timeout_s=timeout_s, on_health=on_health)
        stack.callback(supervisor.shut_down, stop_timeout_s(settings))
        client = stack.enter_context(Client(settings.coordinator_address))
        client.register_reward(REWARD_NAME, stack.enter_context(_served_reward(settings.mesh.runtime_dir)))
        yield BenchMesh(client, before_bytes, time.monotonic() - began)


def run_arm(job: Job, arm: Arm, mesh: BenchMesh, settings: Settings, output: Output) -> ArmRun:
    """A run of its own, from the checkpoint's weights. Raises what training raises."""
    client, began = mesh.client, time.monotonic() - mesh.up_s
    with watch_memory(job.device, arm.gpus) as memory:
        memory.before_bytes = mesh.before_bytes
        run = client.create_run(arm.run_name, settings.run)
        start_s = time.monotonic() - began
        output.note(f"{arm}: {'mesh and run' if mesh.up_s else 'run'} in {seconds_text(start_s)}")
        mesh.up_s = 0.0
        ended = _iterate(client, run.name, job, output, str(arm))
        samples = [_samples(client, run.name, iteration, job) for iteration in range(job.iterations)]
        history = read_history(client, run.name)
    ends = [result.end_time.timestamp() for result in ended]
    return ArmRun(arm, history, [[list(map(len, group)) for group in groups] for groups in samples],
                  hashlib.sha256(repr(samples[0]).encode()).hexdigest(), start_s,
                  [after - before for before, after in zip(ends, ends[1:])], memory, settings.plain())


def _iterate(client: Client, run: str, job: Job, output: Output, title: str) -> list[Iteration]:
    """One iteration is always handed in ahead, so that its media are read while the one before works."""
    prompts, ended = job.prompts(), []
    handles = [client.submit_iteration(run, prompts)]
    for iteration in range(job.iterations):
        if iteration + 1 < job.iterations:
            handles.append(client.submit_iteration(run, prompts))
        ended.append(client.wait(handles[iteration]))
        output.note(f"{title}: iteration {iteration} {ended[-1].state} in "
                    f"{seconds_text(ended[-1].metrics.get('timing_s/step', 0.0))}")
        if ended[-1].state != "done":
            raise InternalError(f"{title}: iteration {iteration} was {ended[-1].state}", reason="BENCH_BROKEN_OFF")
    return ended


def _samples(client: Client, run: str, iteration: int, job: Job) -> list[list[list[int]]]:
    """Token ids by group and sample. Raises DataLoss unless every sample has the length that its seed gives."""
    found: list[list[list[int]]] = [[] for _ in range(job.groups)]
    for sample in client.list_samples(run, iteration):
        found[sample.group_index].append(list(sample.token_ids))
    if [list(map(len, group)) for group in found] != job.lengths(iteration):
        raise DataLoss(f"run {run}, iteration {iteration}: responses have other lengths than the job prescribes",
                       reason="OTHER_JOB")
    return found


def check_same_job(runs: list[ArmRun]) -> None:
    """Raises DataLoss when an arm had other prompts or lengths than the first one."""
    def of(run: ArmRun) -> tuple[Any, ...]:
        records = run.history.iterations
        return run.lengths, [record.metrics["rollplex/prompts_hash"] for record in records], [
            record.metrics["reward"] for record in records]

    for run in runs[1:]:
        if of(run) != of(runs[0]):
            raise DataLoss(f"{run.arm} did another job than {runs[0].arm}: prompts, lengths or rewards differ",
                           reason="OTHER_JOB")


def check_updated(run: ArmRun) -> None:
    """Raises InternalError when an iteration trained nothing: its time is not that of the job."""
    skipped = [index for index, record in enumerate(run.history.iterations) if record.metrics.get("rollplex/update_skipped")]
    if skipped:
        raise InternalError(f"{run.arm}: no update in iterations {', '.join(map(str, skipped))} (gradient norm "
                            f"{run.history.iterations[skipped[0]].metrics.get('grad_norm')}); under a cap of SMs see "
                            "docs/adr/0009-sharing-policies.md", reason="NOTHING_TRAINED")


@contextlib.contextmanager
def _served_reward(runtime_dir: Path) -> Iterator[str]:
    address = f"unix:{runtime_dir / 'bench-reward.sock'}"
    log = runtime_dir / "logs" / "bench-reward.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward", REWARD, "--address", address],
                                   stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60.0
        while not (runtime_dir / "bench-reward.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise InternalError("the benchmark's reward did not start: " + "; ".join(last_lines(log, 3)),
                                    reason="REWARD_FAILED")
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def _keep_logs(runtime_dir: Path, logs: Path) -> None:
    if (runtime_dir / "logs").is_dir():
        shutil.rmtree(logs, ignore_errors=True)
        shutil.copytree(runtime_dir / "logs", logs)
