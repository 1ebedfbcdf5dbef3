"""demo: data and a small model made on the spot, trained for real, with equation 1 and a report at the end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from typing import Any

from rich.table import Table

from rollplex_client.cli import demo_setup
from rollplex_client.cli.loop import Plan
from rollplex_client.cli.mesh import bring_up, stop_timeout_s
from rollplex_client.cli.mesh_commands import health_display
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import Settings, merged
from rollplex_client.cli.train_command import finish, run_plan
from rollplex_client.formatting import seconds_text
from rollplex_client.history import RunHistory, read_history
from rollplex_client.report.sections import TIME_LABELS
from rollplex_client.summary import OverlapComparison, compare_overlap, summary
from rollplex_client.sync import Client

CALIBRATION_ITERATIONS = 6
"""Of the other schedule, with the same prompts and seeds as the main run's first. The first of each is warm-up."""


def demo(arguments: argparse.Namespace, output: Output) -> None:
    from rollplex.demo.recipe import DemoRecipe

    recipe, began = DemoRecipe(), time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for old in ("metrics.jsonl", "metrics-calibration.jsonl", "summary.json", "report.html"):
        (arguments.out / old).unlink(missing_ok=True)
    data = demo_setup.build(arguments, output)
    built_s = time.monotonic() - began
    output.note(f"data and warm-started model in {seconds_text(built_s)}: {arguments.out / 'data'}")
    settings = demo_setup.settings_for(arguments, recipe, data)
    plan = Plan(f"demo-{time.strftime('%Y%m%d-%H%M%S')}", demo_setup.prompts(recipe, data.train),
                demo_setup.prompts(recipe, data.heldout), arguments.iterations or recipe.iterations,
                recipe.groups_per_iteration, shuffle=False, seed=arguments.seed)
    with contextlib.ExitStack() as stack:
        with health_display(output) as on_health:
            supervisor = bring_up(settings, timeout_s=arguments.timeout, on_health=on_health)
        if not arguments.keep_up:
            stack.callback(supervisor.shut_down, stop_timeout_s(settings))
        up_s = time.monotonic() - began - built_s
        output.note(f"{len(supervisor.names())} services up in {seconds_text(up_s)}")
        client = stack.enter_context(Client(settings.coordinator_address))
        stack.enter_context(demo_setup.control(arguments.control, settings, client, arguments.seed))
        calibration = _calibrate(client, settings, plan, arguments, output)
        run_plan(client, settings, plan, arguments.out, output)
        history = read_history(client, plan.run)
    _report(arguments, output, history, calibration, {
        "seed": arguments.seed, "control": arguments.control, "warm_start": data.facts, "build_s": built_s,
        "start_s": up_s, "wall_s": time.monotonic() - began})


def _calibrate(client: Client, settings: Settings, plan: Plan, arguments: argparse.Namespace, output: Output
               ) -> RunHistory:
    """A few iterations under the other schedule, on the same mesh, before the main run."""
    other = "serial" if settings.run.schedule == "overlap" else "overlap"
    short = dataclasses.replace(plan, run=f"{plan.run}-{other}", heldout=(), iterations=CALIBRATION_ITERATIONS)
    run_plan(client, merged(settings, {"run": {"schedule": other}}), short, arguments.out, output,
             metrics_name="metrics-calibration.jsonl")
    return read_history(client, short.run)


def _report(arguments: argparse.Namespace, output: Output, history: RunHistory, calibration: RunHistory,
            facts: dict[str, Any]) -> None:
    overlapping = history.run.config["schedule"] == "overlap"
    serial, overlap = (calibration, history) if overlapping else (history, calibration)
    measured = slice(1, CALIBRATION_ITERATIONS)
    comparison = compare_overlap(serial.iterations[measured], overlap.iterations[measured])
    result = {**summary(history, facts["wall_s"]), **facts,
              "overlap_predicted_s": comparison.predicted_s if comparison else None,
              "overlap_predicted_with_slowdown_s": comparison.predicted_with_slowdown_s if comparison else None,
              "overlap_measured_s": comparison.measured_s if comparison else None,
              "serial_measured_s": comparison.serial_s if comparison else None,
              "overlap": comparison.plain() if comparison else None}
    finish(output, arguments.out, history, result, _phase_table(result["phase_s"]), *_overlap_lines(comparison),
           baseline=calibration)


def _phase_table(seconds: dict[str, float]) -> Table:
    table = Table("span", "mean seconds", "of iteration", box=None, pad_edge=False)
    for name, label in TIME_LABELS.items():
        if name in seconds:
            table.add_row(label, f"{seconds[name]:.3f}", f"{100 * seconds[name] / seconds['step']:.0f}%")
    return table


def _overlap_lines(comparison: OverlapComparison | None) -> list[str]:
    if comparison is None:
        return ["overlap: not measured, the run was too short"]
    return [f"\nserial {comparison.serial_s:.3f} s an iteration (decode {comparison.decode_s:.3f}, prefixes "
            f"{comparison.prefix_s:.3f}, rest {comparison.post_s:.3f})",
            f"overlap predicted {comparison.predicted_s:.3f} s, with the slowdowns seen "
            f"{comparison.predicted_with_slowdown_s:.3f} s; measured {comparison.measured_s:.3f} s"]
