"""Names of runs, commands and slabs, and the seeds of samples."""

from __future__ import annotations

import hashlib
import re
import secrets

from rollplex.core.errors import BadInput

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def check_run_name(name: str) -> str:
    if not _RUN_NAME.fullmatch(name):
        raise BadInput(f"run name {name!r} must be 1-63 of a-z, 0-9 and '-', and not start with '-'",
                       reason="BAD_RUN_NAME")
    return name


def new_id(prefix: str) -> str:
    """An unguessable name: `prefix-` and 128 random bits in hex."""
    return f"{prefix}-{secrets.token_hex(16)}"


def actor_slab(run: str, device: str) -> str:
    return f"runs/{run}/actor/{device}"


def copy_name(run: str, process: str) -> str:
    """A replica's copy of the run's actor, as the broker knows it; no run has such a name."""
    return f"{run}@{process}"


def state_slab(run: str, rank: int, what: str) -> str:
    """Slabs of a trainer rank: `what` is "optimizer", "gradients" or "flips"."""
    return f"runs/{run}/trainer-{rank}/{what}"


def media_slab(run: str, iteration: int, group_index: int, tag: str, *, validation: bool = False) -> str:
    """`tag`: the coordinator's, so that a successor is not in the way of slabs that engines still lease."""
    kind = "validation" if validation else "iteration"
    return f"runs/{run}/media/{kind}-{iteration}/{group_index}-{tag}"


def sample_seed(run_seed: int, iteration: int, prompt_ordinal: int, sample_index: int) -> int:
    """A 64-bit seed, equal for a replayed sample whatever the schedule, batch or process."""
    text = f"{run_seed}/{iteration}/{prompt_ordinal}/{sample_index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
