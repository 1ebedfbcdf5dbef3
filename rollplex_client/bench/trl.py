"""The same job with TRL, in a process of its own (`rollplex.bench.trl_run`), while no mesh is up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollplex.core.errors import InternalError
from rollplex_client.bench.arms import TIME_SLICE, Arm
from rollplex_client.bench.gpu_memory import watch_memory
from rollplex_client.bench.job import Job
from rollplex_client.bench.measure import FIRST_MEASURED, mfu, rollout_distance, throughput
from rollplex_client.bench.run_arm import REWARD
from rollplex_client.cli.mesh import last_lines

LOG_LINES = 20


def run_trl(job: Job, folder: Path, batch: int, vllm_share: float, vllm_options: dict[str, Any], timeout_s: float
            ) -> dict[str, Any]:
    """What trl_run measured, and the GPU's memory as the driver saw it; where time ran out, of the steps that were done
    (`complete` says so), if one of them counts. Raises InternalError with the log's last lines."""
    folder.mkdir(parents=True, exist_ok=True)
    order, answer, log = folder / "job.json", folder / "result.json", folder / "trl.log"
    answer.unlink(missing_ok=True)
    order.write_text(json.dumps({
        "device": job.device, "checkpoint": str(job.checkpoint), "videos": job.workload["videos"],
        "texts": job.workload["texts"], "samples": job.samples, "iterations": job.iterations,
        "lengths": [job.lengths(iteration) for iteration in range(job.iterations)], "max_response": job.max_response,
        "prompt_tokens": job.prompt_tokens, "kl_coef": job.kl_coef, "seed": job.seed, "learning_rate": job.learning_rate,
        "reward": REWARD, "batch": batch, "vllm_share": vllm_share, "vllm_options": vllm_options,
        "out": str(folder / "checkpoints"), "answer": str(answer)}))
    # With several GPUs visible transformers' Trainer would want a launcher.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    ended = ""
    with watch_memory(job.device) as memory, log.open("w") as file:
        try:
            done = subprocess.run([sys.executable, "-m", "rollplex.bench.trl_run", str(order)], stdout=file, stderr=file,
                                  env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            ended = f"TRL has not ended within {timeout_s:.0f} s"
        else:
            if done.returncode or not answer.is_file():
                raise InternalError(f"TRL ended with status {done.returncode}; {_end_of(log)}", reason="TRL_FAILED")
    result = json.loads(answer.read_text()) if answer.is_file() else {"steps_s": []}
    if len(result["steps_s"]) <= FIRST_MEASURED:
        raise InternalError(f"{ended}; {len(result['steps_s'])} steps were done; {_end_of(log)}", reason="TRL_FAILED")
    return result | {"complete": not ended, "gpu_memory": {"before_bytes": memory.before_bytes, "peak_bytes": memory.peak_bytes}}


def _end_of(log: Path) -> str:
    return f"the end of {log}:\n" + "\n".join(f"    {line}" for line in last_lines(log, LOG_LINES))


def trl_result(job: Job, measured: dict[str, Any], arms: list[dict[str, Any]], hardware: Mapping[str, Any]) -> dict[str, Any]:
    """With the step time over each arm's. TRL's step includes reading media, so arms are taken by their wall time."""
    steps = measured["steps_s"][FIRST_MEASURED:]
    works = [job.work(iteration) for iteration in range(FIRST_MEASURED, len(measured["steps_s"]))]
    step_s = statistics.median(steps)
    return measured | {"step_s": step_s, "mfu": mfu(job, works, steps, hardware, 1),
                       "rollout": rollout_distance(job, works, measured["generate_s"][FIRST_MEASURED:len(measured["steps_s"])],
                                                   hardware, Arm("serial", TIME_SLICE)),
                       "throughput": throughput(works, steps, job.samples),
                       "slower_than": {arm["arm"]: step_s / arm["wall_s"] for arm in arms}}
