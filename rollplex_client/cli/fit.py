"""Whether a mesh can fit on this host, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollplex.core.errors import OutOfMemory
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import Choice, Plan, make_plan
from rollplex.core.memory_sizes import PlanInput, Work
from rollplex.core.shapes import read_shapes
from rollplex_client.formatting import size_text


def check_fits(sections: Mapping[str, Any]) -> Plan:
    """Raises OutOfMemory, with the table, when weights and training state alone exceed what slabs may take.

    On a host mesh the devices' slabs are host memory too. What an iteration adds depends on its prompts and is not
    counted: nothing that could run is refused.
    """
    run = sections["run"]
    plan = make_plan(_plan_input(sections), Choice("pinned", "pinned", run.saved_activations, run.suffix_activations))
    table = slab_bytes(plan, sections)
    needed = sum(table.values())
    if needed > plan.given.host_bytes:
        lines = "\n".join(f"    {name:<18} {size_text(size):>12}" for name, size in table.items())
        raise OutOfMemory(f"the mesh cannot fit: weights and training state take {size_text(needed)}, slabs may take "
                          f"{size_text(plan.given.host_bytes)} (broker.host_limit_bytes, else the container's limit less an "
                          f"eighth)\n{lines}\n  a smaller model.dtype, a frozen tower or decoder (run.optimizer) or a smaller "
                          "model takes less; `rollplex plan` shows a GPU mesh", reason="MESH_CANNOT_FIT",
                          needed_bytes=needed, limit_bytes=plan.given.host_bytes)
    return plan


def slab_bytes(plan: Plan, sections: Mapping[str, Any]) -> dict[str, int]:
    """Object class -> bytes of the slabs that exist whatever the prompts are."""
    devices = plan.given.gpus
    table = {"actor_snapshot": plan.columns[0].hbm["actor_snapshot"] * devices,
             **{name: size for name, size in plan.host.items() if name != "media"}}
    if sections["run"].saved_activations == "offload":
        table["pinned_pool"] = sections["trainer"].offload_pool_bytes * devices
    return table


def _plan_input(sections: Mapping[str, Any]) -> PlanInput:
    topology, run, limit = sections["mesh"].topology, sections["run"], sections["broker"].host_limit_bytes
    host_bytes = {None: default_host_limit_bytes(), 0: 1 << 60}.get(limit, limit)
    return PlanInput(
        shapes=read_shapes(sections["model"].checkpoint),
        topology=topology, gpus=topology.device_count,
        hbm_bytes=host_bytes, host_bytes=host_bytes, runtime_bytes=0, schedule=run.schedule, dtype=sections["model"].dtype,
        reference=run.loss.kl_coef > 0, freeze_vision=run.optimizer.module_learning_rates()["vision"] == 0,
        freeze_decoder=run.optimizer.freeze_decoder,
        work=Work(groups=1, samples=1, prompt_tokens=1, response_tokens=1, micro_batch_samples=1,
                  chunk_elements=run.optimizer.chunk_elements))
