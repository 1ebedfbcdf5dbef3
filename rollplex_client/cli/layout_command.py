"""layout: which parameters training and rollout can share, from a config alone."""

from __future__ import annotations

import argparse
from typing import Any

from rollplex.core.aliasing import AliasCase
from rollplex.core.model_layout import ClassTotal, LayoutSummary, summarise
from rollplex.core.topology import Topology
from rollplex_client.cli.output import Output
from rollplex_client.cli.published import model_shapes
from rollplex_client.formatting import size_text


def layout(arguments: argparse.Namespace, output: Output) -> None:
    topology = Topology(arguments.train_tp, arguments.rollout_tp)
    found = summarise(model_shapes(arguments.model), topology, arguments.train_layout, arguments.dtype)
    output.result(as_json(found), _title(found), _table(found), _verdict(found))


def as_json(found: LayoutSummary) -> dict[str, Any]:
    def total(item: ClassTotal) -> dict[str, Any]:
        return {"parameters": item.parameters, "tensors": item.tensors,
                "bytes_per_gpu": item.rollout_elements * found.item_bytes}

    return {"train_tp": found.topology.train_tp, "rollout_tp": found.topology.rollout_tp, "dtype": found.dtype,
            "train_layout": found.train_layout,
            "language_model": {case.value: {**total(item), "share": found.share(case)}
                               for case, item in found.language.items()} | {"total": total(found.language_total)},
            "vision_tower": total(found.vision_total), "rebuilt_bytes_per_gpu": found.rebuilt_bytes}


def _title(found: LayoutSummary) -> str:
    return (f"training TP {found.topology.train_tp} ({found.train_layout}), rollout TP {found.topology.rollout_tp}, "
            f"{found.dtype}")


def _table(found: LayoutSummary) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("class", "parameters", "share", "tensors", "of a GPU's slab"):
        table.add_column(name, justify="left" if name == "class" else "right", no_wrap=True)

    def row(name: str, item: ClassTotal, share: str = "") -> None:
        table.add_row(name, f"{item.parameters / 1e9:.2f} B", share, str(item.tensors),
                      size_text(item.rollout_elements * found.item_bytes))

    for case in AliasCase:
        row(case.name, found.language[case], f"{found.share(case):.1%}")
    row("language model", found.language_total, "100.0%")
    row("vision tower, whole on every GPU", found.vision_total)
    return table


def _verdict(found: LayoutSummary) -> str:
    if not found.rebuilt_bytes:
        return "all parameters are shared; reconstruction buffer per GPU: 0 B"
    return (f"shared: {1 - found.share(AliasCase.INCOMPATIBLE):.1%} of the language model; reconstruction buffer per GPU: "
            f"{size_text(found.rebuilt_bytes)}")
