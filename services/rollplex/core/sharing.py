"""How the processes of a mesh share a GPU: what each policy of `mesh.sharing` asks for. Pure data.

docs/adr/0009-sharing-policies.md says what each does in fact, and which names of the paper's Table 2 it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PREFIX_ROLES = ("trainer", "reference")
GPU_ROLES = (*PREFIX_ROLES, "rollout")

CONTROL = "nvidia-cuda-mps-control"
"""Starts the daemon, and asks it."""
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"
PERCENT_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

SM_STEP = 8
"""A green context on compute capability 9.0 takes SMs by eights, eight at least (CUDA driver API, green contexts)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The default is plain MPS."""

    daemon: bool = True
    """Whether the mesh runs an MPS control daemon of its own."""
    prefix_yields: bool = False
    """Trainer and reference are clients below rollout's priority."""
    prefix_clients_capped: bool = False
    """Trainer and reference get prefix_sm_percent of the SMs, in all that they do."""
    rollout_gets_rest: bool = False
    """Rollout gets 100 - prefix_sm_percent."""
    prefix_stream_capped: bool = False
    """Blocks of a prefix run on a stream of prefix_sm_percent of the SMs; all else of those processes on all of them."""
    sm_percent: int = 50
    """prefix_sm_percent where the configuration says nothing. A client's cap cannot be any number: rollplex.engine.products."""


POLICIES = {
    "time-slice": Policy(daemon=False),
    "mps-default": Policy(),
    "mps-priority": Policy(prefix_yields=True),
    "thread-cap": Policy(prefix_yields=True, prefix_clients_capped=True),
    "sm-affinity": Policy(prefix_clients_capped=True, rollout_gets_rest=True),
    "green-context": Policy(prefix_yields=True, prefix_stream_capped=True, sm_percent=70),
}


def environment(policy: Policy, role: str, *, pipe_directory: Path, prefix_sm_percent: int) -> dict[str, str]:
    """Variables that a process of `role` needs before it first touches CUDA.

    The pipe directory is the mesh's own under every policy: without a daemon there, a process takes no part in MPS, whatever
    other daemon the machine runs.
    """
    if role not in GPU_ROLES:
        return {}
    variables = {PIPE_VARIABLE: str(pipe_directory)}
    on_prefix_side = role in PREFIX_ROLES
    if policy.prefix_yields:
        # 0 is normal and 1 below normal; there are no others.
        variables[PRIORITY_VARIABLE] = "1" if on_prefix_side else "0"
    if policy.prefix_clients_capped and on_prefix_side:
        variables[PERCENT_VARIABLE] = str(prefix_sm_percent)
    if policy.rollout_gets_rest and not on_prefix_side:
        variables[PERCENT_VARIABLE] = str(100 - prefix_sm_percent)
    return variables


def without_mps_variables(variables: dict[str, str]) -> dict[str, str]:
    """An environment for a mesh to inherit: what the user's shell says about another daemon, or caps, is not for it."""
    return {name: value for name, value in variables.items() if not name.startswith("CUDA_MPS_")}


def control_environment(variables: dict[str, str], pipe_directory: Path) -> dict[str, str]:
    """Of the control command, as a daemon or to ask one: CUDA_VISIBLE_DEVICES would number the GPUs twice, once for the daemon,
    then for its clients, who have it too."""
    kept = {name: value for name, value in without_mps_variables(variables).items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | {PIPE_VARIABLE: str(pipe_directory)}


def green_sm_count(sm_count: int, percent: int) -> int:
    """SMs to ask a green context for: the multiple of SM_STEP next to `percent` of `sm_count`, within [SM_STEP, sm_count]."""
    wanted = round(sm_count * percent / 100 / SM_STEP) * SM_STEP
    return min(max(wanted, SM_STEP), sm_count // SM_STEP * SM_STEP)
