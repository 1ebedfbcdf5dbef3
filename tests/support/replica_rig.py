"""Rollout replicas in processes of their own, on the mesh of the rollout contract."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from engine_rig import EngineClient, engine_process

from rollplex.core.topology import Topology

VLLM = ("--set", "rollout.engine=vllm", "--set", "rollout.vllm.kv_cache_gib=0.0625", "--set", "rollout.vllm.max_model_len=2048")
WORKER = ("--set", "rollout.vllm.worker_process=true")


def replica_process(mesh: Any, topology: Topology, replica: int, *options: str
                    ) -> AbstractContextManager[tuple[EngineClient, subprocess.Popen]]:
    """`python -m rollplex.rollout --replica R`, the leader of the replica's ranks."""
    settings = {"model.checkpoint": mesh.checkpoint, "model.dtype": mesh.model.dtype, "rollout.max_rows": 12,
                "mesh.rollout_tensor_parallel": topology.rollout_tp, "mesh.train_tensor_parallel": topology.train_tp,
                "mesh.devices": topology.device_kind, "mesh.sharing": "time-slice"}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    # Three processes import vLLM at TP 2: half a minute on two idle cores, minutes on busy ones.
    ready_s = 300 if "rollout.engine=vllm" in options else 90
    return engine_process(mesh.section, "rollplex.rollout", f"rollout-{replica}", "--replica", str(replica), *arguments, *options,
                          ready_s=ready_s)


def children(pid: int) -> list[int]:
    """Processes that this one has spawned and that are not reaped yet."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def mapped_ranges(inode: int, pid: int | str = "self") -> list[tuple[int, int, str]]:
    """(start, end, permissions) of a process's mappings of a file."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = [(fields[0].split("-"), fields[1]) for fields in lines if int(fields[4]) == inode]
    return [(int(start, 16), int(end, 16), permissions) for (start, end), permissions in found]


def wait_ended(pidfd: int, timeout_s: float) -> None:
    """Closes the pidfd of a process that ends in time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), "the process still runs"
    os.close(pidfd)
