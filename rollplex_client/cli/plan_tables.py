"""A memory plan for people."""

from __future__ import annotations

from typing import Any

from rollplex.core.memory_plan import Plan
from rollplex.core.memory_sizes import GIB
from rollplex.core.naive_overlap import NaiveRow
from rollplex_client.formatting import size_text


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f}"


def _table(*names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("role", "component", "object class") else "right", no_wrap=True)
    return table


def naive_table(rows: list[NaiveRow]) -> Any:
    """Nominal: the same row for the round number of parameters that the model's publisher states."""
    nominal = any(row.nominal_bytes is not None for row in rows)
    table = _table("role", "component", "language", "tower", "total", *(["nominal"] if nominal else []), "from")
    for row in rows:
        stated = [_gib(row.nominal_bytes) if row.nominal_bytes is not None else ""] if nominal else []
        table.add_row(row.role, row.component, _gib(row.language_bytes), _gib(row.tower_bytes), _gib(row.size_bytes),
                      *stated, row.source.value)
    language, tower = sum(row.language_bytes for row in rows), sum(row.tower_bytes for row in rows)
    table.add_row("total", "", _gib(language), _gib(tower), _gib(language + tower), *([""] if nominal else []), "")
    return table


def nominal_text(plan: Plan) -> str:
    shapes = plan.given.shapes
    if shapes.nominal_parameters is None:
        return ""
    counted = plan.given.layout.language_total.parameters
    return (f"  nominal: the language model at the {shapes.nominal_parameters / 1e9:g} B parameters that its publisher states; "
            f"counted: {counted / 1e9:.2f} B")


def phase_table(plan: Plan) -> Any:
    table = _table("object class", *(column.name for column in plan.columns), "host")
    names = dict.fromkeys(name for held in (*(column.hbm for column in plan.columns), plan.host) for name in held)
    for name in names:
        cells = [column.hbm.get(name) for column in plan.columns] + [plan.host.get(name)]
        table.add_row(name, *("" if size is None else _gib(size) for size in cells))
    table.add_row("total", *(_gib(column.total) for column in plan.columns), _gib(plan.host_total))
    table.add_row("limit", *(_gib(plan.given.hbm_bytes) for _ in plan.columns), _gib(plan.given.host_bytes))
    return table


def choice_text(plan: Plan) -> str:
    choice = plan.choice
    reference = f", reference weights {choice.reference}" if plan.given.reference else ""
    kv = "" if plan.kv_share == 1 else f"; rollout KV for {plan.kv_share:.0%} of the samples at once, the others wait"
    relaxed = "; a resident reference relaxes the residency contract in UPDATE" if (
        plan.given.reference and choice.reference == "resident") else ""
    return (f"planned: gradients {choice.gradients}{reference}, prefix activations {choice.activations}, "
            f"suffix activations {choice.suffix_activations}, "
            f"moments {plan.given.moments_dtype}{kv}{relaxed}")


def verdict_text(plan: Plan) -> str:
    if plan.fits:
        return (f"fits: peak {size_text(plan.peak.total)} of {size_text(plan.given.hbm_bytes)} HBM in {plan.peak.name}, "
                f"{size_text(plan.host_total)} of {size_text(plan.given.host_bytes)} host")
    lacks = []
    if plan.hbm_over:
        lacks.append(f"{size_text(plan.hbm_over)} of HBM in {plan.peak.name}")
    if plan.host_over:
        lacks.append(f"{size_text(plan.host_over)} of host memory")
    return f"does not fit: lacks {' and '.join(lacks)}"
