"""What a result must say about where it comes from: hardware, versions, source and command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput, InternalError

ROOT = Path(__file__).resolve().parents[2]
SMI_FIELDS = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"


def probe_hardware(device: str) -> dict[str, Any]:
    """Runs `rollplex.bench.probe` before anything else is on the GPU. Raises BadInput where there is none."""
    done = subprocess.run([sys.executable, "-m", "rollplex.bench.probe", "--device", device], capture_output=True, text=True,
                          check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if device == "cuda":
            raise BadInput(f"no usable GPU: {last}; --device cpu --shape tiny tries every step on the host",
                           reason="NO_GPU")
        raise InternalError(f"the hardware probe failed: {last}", reason="PROBE_FAILED")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    return facts | ({"nvidia_smi": _said(["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"])}
                    if device == "cuda" else {})


def origin() -> dict[str, Any]:
    """Date, command and commit."""
    dirty = _said(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": shlex.join(["rollplex", *sys.argv[1:]]),
            "commit": _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"]), "uncommitted": bool(dirty)}


def _said(command: list[str]) -> str | None:
    """What a command prints; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if not done.returncode else None
