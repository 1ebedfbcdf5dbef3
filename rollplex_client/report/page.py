"""The page around the sections."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from rollplex_client.history import RunHistory
from rollplex_client.report import sections
from rollplex_client.summary import phase_seconds


def render(history: RunHistory, facts: Mapping[str, Any], baseline: RunHistory | None) -> str:
    """The whole document."""
    run = history.run
    schedule = run.config.get("schedule", "overlap")
    created = f", begun {run.create_time:%Y-%m-%d %H:%M} UTC" if run.create_time else ""
    control = f", control: {facts['control']}" if facts.get("control") else ""
    style = files("rollplex_client.report").joinpath("style.css").read_text(encoding="utf-8")
    memory_note = ("Largest bytes by phase, each slab counted once however many services map it. The bars compare with "
                   "the largest entry.")
    body = "".join([
        f'<h1>{escape(run.name)}</h1><p class="sub">Rollplex, schedule {escape(str(schedule))}, snapshot {run.snapshot}'
        f"{created}{escape(control)}</p>",
        sections.tiles(history, facts),
        sections.section("Learning", sections.learning_curve(history),
                         "Training points are means over sampled responses of an iteration; held-out points are greedy "
                         "responses under the snapshot of that number."),
        sections.section("One iteration", sections.timeline(history, baseline)),
        sections.section("Overlap: predicted and measured", sections.equation(facts),
                         "Medians over iterations of the same prompts, samples and lengths under both schedules, warm-up left "
                         "out."),
        sections.section("Time by phase", sections.time_table(phase_seconds(history)),
                         "Means over all iterations; spans of the OVERLAP window run side by side."),
        sections.section("Memory", sections.memory_table(history.peaks), memory_note),
        sections.section("Notes", sections.notes(history)),
        sections.section("Configuration", sections.configuration(history, facts)),
    ])
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run.name)} – Rollplex</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{style}</style></head><body><main>{body}</main></body></html>")
