"""chaos: a mesh of its own, broken at every named point, and judged by what it learns."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rollplex.core.crash_points import POINTS
from rollplex_client.chaos import cells, leaks
from rollplex_client.chaos.drill import REFERENCE_ITERATIONS, Drill, Outcome, Verdict, carry_out
from rollplex_client.chaos.rig import Rig, rig
from rollplex_client.chaos.soak import Soak, soak
from rollplex_client.cli.output import FAILED, Output
from rollplex_client.formatting import seconds_text, size_text


def chaos(arguments: argparse.Namespace, output: Output) -> int:
    """Exit status 1 when a cell failed or was not reached, or a soak lost an iteration."""
    if arguments.list:
        output.result({name: dataclasses.asdict(point) for name, point in POINTS.items()}, _points_table())
        return 0
    chosen = cells.choose(actions=arguments.actions, processes=arguments.processes, points=arguments.points,
                          count=arguments.cells, seed=arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    output.note("building a model and starting a mesh")
    with rig() as made:
        drill = Drill(made)
        output.note(f"up after {seconds_text(time.monotonic() - began)}; an unfaulted run of {REFERENCE_ITERATIONS} iterations")
        drill.reference()
        if arguments.soak:
            return _soak(arguments, output, made, drill)
        return _cells(arguments, output, made, drill, chosen)


def _cells(arguments: argparse.Namespace, output: Output, made: Rig, drill: Drill, chosen: Sequence[cells.Cell]) -> int:
    done = 0

    def show(verdict: Verdict, logs: dict[str, str]) -> None:
        nonlocal done
        done += 1
        reason = f": {verdict.reason}" if verdict.reason else ""
        output.note(f"{done}/{len(chosen)} {verdict.cell.name} {verdict.outcome} ({verdict.seconds:.1f} s){reason}")
        if logs:
            _keep(arguments.out / verdict.cell.name.replace(":", "-"), logs)

    verdicts = carry_out(made, drill, chosen, show)
    counts = Counter(verdict.outcome.value for verdict in verdicts)
    bad = [verdict for verdict in verdicts if verdict.bad]
    result = {"cells": len(verdicts), **{outcome.value.replace(" ", "_"): counts[outcome.value] for outcome in Outcome},
              "processes": len({verdict.cell.victim for verdict in verdicts}),
              "points": len({verdict.cell.point for verdict in verdicts}), "of_points": len(POINTS),
              "seconds": sum(verdict.seconds for verdict in verdicts), "seed": arguments.seed,
              "custody": dict(drill.baseline.custody), "held": leaks.totals(drill.baseline),
              "failures": [_plain(verdict) for verdict in bad]}
    _write(arguments.out, {**result, "verdicts": [_plain(verdict) for verdict in verdicts]})
    lines = [f"{verdict.cell.name}: {verdict.outcome}: {verdict.reason}" for verdict in bad]
    output.result(result, _cells_table(verdicts), *lines,
                  f"\n{counts['survived']} of {len(verdicts)} cells survived; logs of others and report.json: {arguments.out}")
    return FAILED if bad else 0


def _soak(arguments: argparse.Namespace, output: Output, made: Rig, drill: Drill) -> int:
    began = time.monotonic()

    def show(taken: Soak) -> None:
        output.note(f"{seconds_text(time.monotonic() - began)}: {taken.iterations} iterations, {len(taken.lost)} lost, "
                    f"{sum(taken.kills.values())} kills" + (f"; {taken.lost[-1]}" if taken.lost else ""))

    taken = soak(made, drill, arguments.soak, arguments.seed, arguments.actions, show)
    leaked = drill.leaks(made.wait_whole())
    result = {**dataclasses.asdict(taken), "kills_in_all": sum(taken.kills.values()), "leaked": leaked, "seed": arguments.seed}
    _write(arguments.out, result)
    if taken.lost or leaked:
        _keep(arguments.out / "soak", made.log_ends(400))
    output.result(result, _soak_table(taken), *taken.lost, *leaked,
                  f"\n{taken.iterations} iterations in {arguments.soak:g} min, {len(taken.lost)} lost, "
                  f"{sum(taken.kills.values())} kills; {len(leaked)} leaks")
    return FAILED if taken.lost or leaked else 0


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {"cell": verdict.cell.name, **dataclasses.asdict(verdict.cell), "outcome": verdict.outcome.value,
            "seconds": round(verdict.seconds, 2), "reason": verdict.reason}


def _write(out: Path, result: dict[str, Any]) -> None:
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n")


def _keep(folder: Path, logs: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text + "\n")


def _points_table() -> Table:
    table = Table("crash point", "an iteration", "there", box=None, pad_edge=False)
    for name, point in POINTS.items():
        table.add_row(name, f"{point.times}x" if point.when == "iteration" else point.when, point.world)
    return table


def _cells_table(verdicts: Sequence[Verdict]) -> Table:
    """A row a role of the point, a column a victim: survived of carried out."""
    table = Table("killed or stopped at", *cells.SERVICES, box=None, pad_edge=False)
    for role in cells.ROLES:
        row = [[verdict for verdict in verdicts if POINTS[verdict.cell.point].role == role and verdict.cell.victim == victim]
               for victim in cells.SERVICES]
        if any(row):
            table.add_row(f"{role}.*", *(f"{sum(one.outcome is Outcome.SURVIVED for one in part)}/{len(part)}" if part else "-"
                                         for part in row))
    return table


def _soak_table(taken: Soak) -> Table:
    table = Table("service", "kills", "RSS at start", "RSS at end", box=None, pad_edge=False)
    for name in cells.SERVICES:
        table.add_row(name, str(taken.kills.get(name, 0)), size_text(taken.start.resident[name]),
                      size_text(taken.end.resident[name]))
    table.add_row("host slabs", "", size_text(taken.start.host_slabs), size_text(taken.end.host_slabs))
    return table
