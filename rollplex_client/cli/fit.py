"""Whether a mesh can fit on this host and its devices, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from rollplex.core.errors import OutOfMemory
from rollplex.core.hbm_shares import EngineChoices
from rollplex.core.host_memory import default_host_limit_bytes
from rollplex.core.memory_plan import Choice, Plan, make_plan
from rollplex.core.memory_sizes import GIB, PlanInput, Work
from rollplex.core.shapes import read_shapes
from rollplex_client.formatting import size_text

UNLIMITED = 1 << 60
Sections = Mapping[str, Any]


def check_fits(sections: Sections) -> Plan:
    """Raises OutOfMemory, with the table, when what exists whatever the prompts are exceeds what slabs may take of the host, or
    mesh.hbm_budget_gib on a device.

    On a host mesh the devices' slabs are host memory too. What an iteration adds depends on its prompts and is not
    counted: nothing that could run is refused. The broker checks that as each phase begins.
    """
    plan = mesh_plan(sections)
    _check_host(plan, sections)
    if sections["mesh"].hbm_budget_bytes and plan.hbm_over:
        raise OutOfMemory(f"the mesh cannot fit: {plan.peak.name} takes {size_text(plan.peak.total)} of each device before any "
                          f"prompt is there; mesh.hbm_budget_gib is {size_text(plan.given.hbm_bytes)}\n{_table(plan.peak.hbm)}"
                          + "".join(f"\n  change {text}" for text in changes(sections)), reason="MESH_CANNOT_FIT",
                          needed_bytes=plan.peak.total, limit_bytes=plan.given.hbm_bytes, phase=plan.peak.phase.value)
    return plan


def mesh_plan(sections: Sections) -> Plan:
    """What the mesh holds as it is configured, with one prompt and one response of one token."""
    run, choices = sections["run"], engine_choices(sections)
    return make_plan(_plan_input(sections, choices), Choice(
        **choices.as_plan(), activations=run.saved_activations, suffix_activations=run.suffix_activations))


def engine_choices(sections: Sections) -> EngineChoices:
    """As the engines will say when they join."""
    rollout = sections["rollout"]
    return EngineChoices(gradients=sections["trainer"].gradient_place(sections["mesh"].devices),
                         reference=sections["reference"].weights,
                         kv_pool_bytes=round(rollout.vllm.kv_cache_gib * GIB) if rollout.engine == "vllm" else 0)


def slab_bytes(plan: Plan, sections: Sections) -> dict[str, int]:
    """Object class -> bytes of host memory in slabs that exist whatever the prompts are."""
    devices, held = plan.given.gpus, plan.columns[0].hbm
    table = {name: size for name, size in plan.host.items() if name != "media"}
    if sections["mesh"].devices == "host":
        # Weights that a device shares; other classes of a device come and go.
        permanent = ("actor_snapshot", *plan.relaxed)
        table = {name: held[name] * devices for name in permanent if name in held} | table
    if sections["run"].saved_activations == "offload":
        table["pinned_pool"] = sections["trainer"].offload_pool_bytes * devices
    return table


def changes(sections: Sections) -> list[str]:
    """Single changes of keys with which the mesh fits its devices; at last the budget that it needs as it is."""
    enough = [text for text, changed in _single_changes(sections) if not mesh_plan(changed).hbm_over]
    needed = -(-mesh_plan(sections).peak.total * 100 // GIB) / 100
    return [*enough, f"mesh.hbm_budget_gib = {needed:g}"]


def _single_changes(sections: Sections) -> Iterator[tuple[str, Sections]]:
    def changed(name: str, **values: Any) -> Sections:
        return {**sections, name: replace(sections[name], **values)}

    run, choices, over = sections["run"], engine_choices(sections), mesh_plan(sections).hbm_over
    for field in fields(run.ablation):
        if getattr(run.ablation, field.name):
            yield (f"run.ablation.{field.name} = false",
                   changed("run", ablation=replace(run.ablation, **{field.name: False})))
    if choices.gradients == "hbm":
        yield 'trainer.gradients = "host"', changed("trainer", gradients="host")
    if choices.reference == "resident" and run.loss.kl_coef:
        yield 'reference.weights = "paged"', changed("reference", weights="paged")
    left = (choices.kv_pool_bytes - over) * 100 // GIB / 100
    if choices.kv_pool_bytes and left > 0:
        smaller = replace(sections["rollout"].vllm, kv_cache_gib=left)
        yield f"rollout.vllm.kv_cache_gib = {left:g}", changed("rollout", vllm=smaller)
    chunk = run.optimizer.chunk_elements // 4
    if chunk >= 1 << 20:
        yield (f"run.optimizer.chunk_elements = {chunk}",
               changed("run", optimizer=replace(run.optimizer, chunk_elements=chunk)))


def _check_host(plan: Plan, sections: Sections) -> None:
    table = slab_bytes(plan, sections)
    needed = sum(table.values())
    if needed > plan.given.host_bytes:
        raise OutOfMemory(f"the mesh cannot fit: weights and training state take {size_text(needed)}, slabs may take "
                          f"{size_text(plan.given.host_bytes)} (broker.host_limit_bytes, else the container's limit less an "
                          f"eighth)\n{_table(table)}\n  a smaller model.dtype, a frozen tower or decoder (run.optimizer) or a "
                          "smaller model takes less; `rollplex plan` shows a GPU mesh", reason="MESH_CANNOT_FIT",
                          needed_bytes=needed, limit_bytes=plan.given.host_bytes)


def _table(sizes: Mapping[str, int]) -> str:
    return "\n".join(f"    {name:<18} {size_text(size):>12}" for name, size in sizes.items())


def _plan_input(sections: Sections, choices: EngineChoices) -> PlanInput:
    mesh, run, limit = sections["mesh"], sections["run"], sections["broker"].host_limit_bytes
    rates = run.optimizer.module_learning_rates()
    host_bytes = {None: default_host_limit_bytes(), 0: UNLIMITED}.get(limit, limit)
    return PlanInput(
        shapes=read_shapes(sections["model"].checkpoint), topology=mesh.topology, gpus=mesh.topology.train_tp,
        rollout_gpus=mesh.topology.replica_count * mesh.topology.rollout_tp,
        hbm_bytes=mesh.hbm_budget_bytes or UNLIMITED, host_bytes=host_bytes, runtime_bytes=mesh.hbm_runtime_bytes,
        schedule=run.schedule, dtype=sections["model"].dtype, reference=run.loss.kl_coef > 0,
        freeze_vision=rates["vision"] == 0, freeze_decoder=rates["decoder"] == 0,
        reference_ranks=mesh.reference_tensor_parallel, data_parallel=mesh.data_parallel,
        kv_pool_bytes=choices.kv_pool_bytes, ablation=run.ablation,
        work=Work(groups=1, samples=1, prompt_tokens=1, response_tokens=1, micro_batch_samples=1,
                  chunk_elements=run.optimizer.chunk_elements))
