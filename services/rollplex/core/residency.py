"""The residency contract (the paper's Table 3) as data: which object class may live where in which phase.

The arena and the broker's ledger check bytes against it at every barrier; `check` names the rows that do not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from rollplex.core.config import AblationConfig
from rollplex.core.phases import Phase


class Residency(StrEnum):
    HBM = "hbm"
    PINNED = "pinned"


ALWAYS = frozenset(Phase)
RUNTIME = "runtime_buffers"
"""Not in the contract: contexts, NCCL and the engines' own buffers, in HBM all the time."""


@dataclass(frozen=True, slots=True)
class ContractRow:
    """One object class."""

    roles: frozenset[str]
    """Who may hold it."""
    hot: frozenset[Phase]
    """Phases in which it may be in HBM."""
    parked: frozenset[Phase]
    """Phases in which it may be PINNED."""


def _row(roles: str, hot: Iterable[Phase], parked: Iterable[Phase] = ()) -> ContractRow:
    return ContractRow(frozenset(roles.split()), frozenset(hot), frozenset(parked))


_O, _S, _U = Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE

CONTRACT: dict[str, ContractRow] = {
    "actor_snapshot": _row("trainer rollout", ALWAYS),
    "rollout_kv": _row("rollout", [_O]),
    "boundary_trainer": _row("trainer", [_O, _S]),
    "boundary_reference": _row("reference", [_O, _S]),
    "reference_weights": _row("reference", [_O, _S], ALWAYS),
    "prefix_activations": _row("trainer", [_O, _S], [_O, _S]),
    "suffix_activations": _row("trainer reference", [_S]),
    "gradients": _row("trainer", [_S, _U], ALWAYS),
    "optimizer_state": _row("trainer", [_U], ALWAYS),
    "pinned_pool": _row("trainer", [], ALWAYS),
    "media": _row("coordinator", [], ALWAYS),
}
"""`actor_snapshot`: one a device; rollout's are the copies on devices of its own. `optimizer_state`: FP32 master weights
and Adam moments, one chunk at a time in HBM. `gradients`: one FP32 buffer, in HBM or in the pinned pool as planned;
between iterations the zeroed buffer may stay parked. `pinned_pool`: allocated once, holds offloaded
`prefix_activations`. `media`: decoded frames in host slabs, one a prompt; those of a queued iteration are decoded
while the one before it runs."""


def relaxed_classes(ablation: AblationConfig, *, reference_resident: bool = False) -> tuple[str, ...]:
    """Classes whose row a run's configuration sets aside, so that they may be in HBM in every phase."""
    chosen = {"reference_weights": reference_resident, "optimizer_state": ablation.no_state_offload,
              "rollout_kv": ablation.rollout_resident}
    return tuple(name for name, is_relaxed in chosen.items() if is_relaxed)


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """What a device will hold of a class in the phase that begins, all roles together."""

    object_class: str
    """A key of CONTRACT, or RUNTIME."""
    device: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one object class that a role holds on a device."""

    object_class: str
    role: str
    device: str
    residency: Residency
    size_bytes: int


def check(phase: Phase, holdings: Iterable[Holding], relaxed: Collection[str] = ()) -> list[str]:
    """What violates the contract in `phase`, as sentences; empty when it holds. Objects of no bytes do not count. Classes in
    `relaxed` may be in HBM in every phase (`relaxed_classes`)."""
    wrong = []
    for held in holdings:
        if not held.size_bytes:
            continue
        row = CONTRACT.get(held.object_class)
        if row is None:
            wrong.append(f"object class {held.object_class!r} is not in the contract")
            continue
        if held.role not in row.roles:
            wrong.append(f"{held.role} may not hold {held.object_class}")
        allowed = {Residency.HBM: row.hot, Residency.PINNED: row.parked}.get(held.residency, frozenset())
        if held.residency is Residency.HBM and held.object_class in relaxed:
            continue
        if phase not in allowed:
            wrong.append(f"{held.object_class}: {held.size_bytes} bytes {held.residency.value} on {held.device} "
                         f"in phase {phase.value}")
    return wrong
