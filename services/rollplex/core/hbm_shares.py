"""A plan as options: each role's share of a device's memory, and the keys that make the engines keep to what was planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.core.memory_plan import AUTO, Choice, Plan, make_plan
from rollplex.core.memory_sizes import GIB, PlanInput
from rollplex.core.residency import CONTRACT

SLABS = frozenset({"actor_snapshot", "reference_weights"})
"""Not in a process's own allocator: a slab, or pages of its own behind fixed addresses."""
GRADIENT_KEYS = {"hbm": "hbm", "pinned": "host"}
REFERENCE_KEYS = {"pinned": "paged", "resident": "resident"}
"""Choice.reference -> reference.weights; no engine re-reads weights from the checkpoint."""


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What the engines' own sections say of residency; the rest is in RunConfig."""

    gradients: str = "host"
    """trainer.gradients."""
    reference: str = "paged"
    """reference.weights."""
    kv_pool_bytes: int = 0
    """Of a device; 0: no pool of a fixed size."""

    def as_plan(self) -> dict[str, str]:
        """As fields of memory_plan.Choice."""
        return {"gradients": {key: name for name, key in GRADIENT_KEYS.items()}[self.gradients],
                "reference": {key: name for name, key in REFERENCE_KEYS.items()}[self.reference]}


def engine_plan(given: PlanInput, wanted: Choice) -> Plan:
    """The best plan that the engines of this release offer. Raises BadInput for a choice that none of them has."""
    if given.moments_dtype != "float32":
        raise BadInput(f"Adam moments in {given.moments_dtype}: the trainer keeps them in float32", reason="BAD_PLAN")
    if wanted.reference not in (AUTO, *REFERENCE_KEYS):
        raise BadInput(f"reference weights {wanted.reference!r}: the reference offers {', '.join(REFERENCE_KEYS)}",
                       reason="BAD_PLAN")
    offered = REFERENCE_KEYS if wanted.reference == AUTO else (wanted.reference,)
    plans = [make_plan(given, replace(wanted, reference=reference)) for reference in offered]
    return max(plans, key=lambda plan: (plan.fits, plan.kv_share))


def role_share(plan: Plan, role: str) -> int:
    """Bytes of one device that a role's own allocator may hold: its largest column, a tenth for fragments, and the runtime's."""
    columns = [column for column in plan.columns if (column.name == "ROLLOUT GPU") == (
        role == "rollout" and plan.given.schedule == "disaggregated")]
    held = max(sum(size for name, size in column.hbm.items() if name not in SLABS and role in _roles(name))
               for column in columns)
    return min(held * 11 // 10 + plan.given.runtime_bytes, plan.given.hbm_bytes)


def plan_keys(plan: Plan) -> dict[str, dict[str, Any]]:
    """Section -> keys under which the engines hold what was planned. Sizes in GiB are rounded up to hundredths."""
    choice, given = plan.choice, plan.given
    keys: dict[str, dict[str, Any]] = {
        "mesh": {"hbm_budget_gib": _gib(given.hbm_bytes), "hbm_runtime_gib": _gib(given.runtime_bytes)},
        "trainer": {"gradients": GRADIENT_KEYS[choice.gradients], "hbm_share_gib": _gib(role_share(plan, "trainer"))},
        "rollout": {"hbm_share_gib": _gib(role_share(plan, "rollout"))},
        "rollout.vllm": {"kv_cache_gib": _gib(max(column.hbm.get("rollout_kv", 0) for column in plan.columns))},
    }
    if given.reference:
        keys["reference"] = {"weights": REFERENCE_KEYS[choice.reference],
                             "hbm_share_gib": _gib(role_share(plan, "reference"))}
    keys["run"] = {"schedule": given.schedule, "saved_activations": choice.activations,
                   "suffix_activations": choice.suffix_activations,
                   "suffix_micro_batch_samples": given.work.micro_batch_samples}
    return keys


def as_toml(keys: dict[str, dict[str, Any]]) -> str:
    """Text for the configuration file."""
    def value(item: Any) -> str:
        return f'"{item}"' if isinstance(item, str) else str(item)

    return "\n".join(f"[{section}]\n" + "".join(f"{name} = {value(item)}\n" for name, item in held.items())
                     for section, held in keys.items())


def _roles(object_class: str) -> frozenset[str]:
    return CONTRACT[object_class].roles if object_class in CONTRACT else frozenset()


def _gib(size: int) -> float:
    return -(-size * 100 // GIB) / 100
