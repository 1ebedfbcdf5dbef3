"""The benchmark's HTML page: one self-contained file in the style of a run's report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollplex_client.bench.tables import (
    Row,
    arm_columns,
    bound_rows,
    equation_table,
    known,
    main_rows,
    memory_rows,
    phase_rows,
    update_rows,
)
from rollplex_client.report.sections import LANES, section
from rollplex_client.report.svg import Bar, Lane, gantt, legend

LEGEND = [("rollout prefill", "six", False), ("rollout decode", "one", False), ("trainer prefix", "two", False),
          ("reference", "five", False), ("suffix and backward", "three", False), ("update", "four", False),
          ("barriers and binds", "soft", False)]
BARRIERS = ("ready", "release", "leave", "bind")
FACTS = ("origin", "job", "hardware", "build")
WIDE = 'class="wide"'


def write_page(path: Path, result: dict[str, Any]) -> Path:
    path.write_text(render(result), encoding="utf-8")
    return path


def render(result: dict[str, Any]) -> str:
    job, origin = result["job"], result["origin"]
    title = f"{job['checkpoint']}: {job['groups']} prompts of {job['prompt_tokens']} tokens, {job['samples']} samples"
    style = files("rollplex_client.report").joinpath("style.css").read_text(encoding="utf-8")
    arms = [arm["arm"] for arm in result["arms"]]
    body = "".join([
        f'<h1>{escape(title)}</h1><p class="sub">rollplex bench, {escape(origin["date"])}, '
        f"{escape(str(result['hardware'].get('gpu', 'CPU')))}; responses {escape(job['length_distribution'])}, "
        f"KL {job['kl_coef']:g}</p>",
        section("Arms", _table("", arm_columns(result), main_rows(result)),
                "Medians over all iterations but the first. FLOPs of MFU count the vision tower, prompts once a group and role, "
                "and no recomputation (rollplex.core.model_work). GPU memory is what the driver reports for all processes."),
        section("Where time goes", timeline(result), "The last iteration of every arm; the rollout bar is split as its engine "
                "timed prompts and decoding."),
        section("Seconds by phase", _table("", arms, phase_rows(result))),
        section("Distance from bounds", _table("", arms, bound_rows(result)),
                "Measured time over the least time that bytes (decode) or FLOPs (prefixes) need; 1 is the bound."),
        section("Equation 1", _table("seconds", list(result["equation"]), equation_table(result)) if result["equation"] else "",
                "T_D and T_P from the serial arm of the same go, same prompts and lengths."),
        section("First update", _table("", arms, update_rows(result)),
                "All arms begin with the same weights: of the same samples the update is the same but for rounding."),
        section("Memory by class", _table("peak", arms, memory_rows(result)), "The broker's ledger."),
        section("TRL", _trl(result)), section("Failed", _failed(result)),
        section("Job, hardware, versions", f"<pre>{escape(json.dumps({key: result[key] for key in FACTS}, indent=1))}</pre>"),
        section("Configuration", "".join(
            f"<details><summary>{escape(arm['arm'])}</summary><pre>{escape(json.dumps(arm['config'], indent=1, default=str))}"
            "</pre></details>" for arm in result["arms"]))])
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{style}</style></head><body><main>{body}</main></body></html>")


def timeline(result: dict[str, Any]) -> str:
    groups = [(f"{arm['arm']}: {arm['step_s']:.2f} s", lanes) for arm in result["arms"] if (lanes := arm_lanes(arm))]
    if not groups:
        return ""
    return f'<div {WIDE}>{gantt(groups, label="What ran when in one iteration of every arm")}</div>' + legend(LEGEND)


def arm_lanes(arm: dict[str, Any]) -> list[Lane]:
    """Lanes of the last iteration. Prompts are read before the first token, so prefill is drawn first."""
    rows: dict[str, list[Bar]] = {}
    for name, start_s, duration_s in arm["spans"]:
        if name == "generate":
            prefill_s = min(duration_s, arm["metrics"][-1].get("rollplex/rollout/prefill_s", 0.0))
            rows["rollout"] = [Bar("prefill", "six", start_s, prefill_s),
                               Bar("decode", "one", start_s + prefill_s, duration_s - prefill_s)]
        elif name in BARRIERS:
            rows.setdefault("mesh", []).append(Bar(name, "soft", start_s, duration_s))
        elif name in LANES and LANES[name][0] in ("reference", "trainer"):
            lane, label, colour = LANES[name]
            rows.setdefault(lane, []).append(Bar(label, colour, start_s, duration_s))
    return [Lane(lane, rows[lane]) for lane in ("rollout", "reference", "trainer", "mesh") if lane in rows]


def _table(corner: str, heads: list[str], rows: Iterator[Row]) -> str:
    body = "".join(f"<tr><td>{escape(text)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
                   for text, cells in known(rows))
    if not body:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in [corner, *heads])
    return f"<div {WIDE}><table><tr>{head}</tr>{body}</table></div>"


def _trl(result: dict[str, Any]) -> str:
    trl = result["trl"]
    if not trl:
        return ""
    rows = [("steps, seconds", ", ".join(f"{step:.2f}" for step in trl["steps_s"])),
            ("of them generation", ", ".join(f"{step:.2f}" for step in trl["generate_s"])),
            ("prompt tokens", ", ".join(map(str, trl["prompt_tokens"]))), ("micro-batch", str(trl["micro_batch"])),
            ("vLLM's further arguments", json.dumps(trl["vllm_options"])),
            *trl["settings"].items()]
    body = "".join(f'<tr><td>{escape(name)}</td><td style="white-space:normal;text-align:left">{escape(text)}</td></tr>'
                   for name, text in rows)
    return f"<div {WIDE}><table>{body}</table></div>"


def _failed(result: dict[str, Any]) -> str:
    return "".join(f"<p><b>{escape(item['what'])}</b> {escape(item['reason'])}</p><pre>{escape(item['message'])}</pre>"
                   for item in result["failed"])
