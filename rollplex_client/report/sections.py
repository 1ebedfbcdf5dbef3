"""The parts of the report, each a piece of HTML or an empty string where a run has nothing to show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rollplex_client.formatting import seconds_text, size_text
from rollplex_client.history import IterationRecord, RunHistory
from rollplex_client.report.svg import Bar, Lane, Series, gantt, legend, line_chart
from rollplex_client.results import LedgerEntry

LANES = {"generate": ("rollout", "generate", "one"), "reference_prefix": ("reference", "prefix", "five"),
         "trainer_prefix": ("trainer", "prefix", "two"), "reward": ("reward", "wait for rewards", "six"),
         "score": ("reference", "score", "five"), "old_logprob": ("trainer", "old log-probabilities", "four"),
         "suffix": ("trainer", "suffix and backward", "three"), "update": ("trainer", "update", "four")}
"""Span -> (who works, what it does, colour)."""

PHASES = ("overlap", "suffix", "update", "idle")

TIME_LABELS = {
    "step": "whole iteration", "overlap": "OVERLAP window", "gen": "generate (rollout)",
    "prefix_reference": "prefix (reference)", "prefix_trainer": "prefix (trainer)", "reward": "waiting for rewards",
    "ref": "score (reference)", "adv": "advantages", "old_log_prob": "old log-probabilities (trainer)",
    "update_actor": "suffix and backward (trainer)", "update_weights": "update (trainer)",
    "ready": "barrier: engines ready", "release_kv": "barrier: rollout's KV given back",
    "leave_snapshot": "barrier: readers leave", "grad_norm": "gradient norm (in update)",
    "write_weights": "chunks and publish (in update)", "bind": "binds (in update)",
}


def section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    hint = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{body}{hint}</section>"


def tiles(history: RunHistory, facts: Mapping[str, Any]) -> str:
    def rise(first: str, last: str) -> str | None:
        values = [facts.get(key) for key in (first, last)]
        return None if None in values else f"{values[0]:.2f} → {values[1]:.2f}"

    throughput = facts.get("tokens_per_s")
    entries = [("accuracy (5 first, last)", rise("accuracy_first5", "accuracy_last5")),
               ("held-out accuracy", rise("heldout_first", "heldout_last")),
               ("reward (5 first, last)", rise("reward_first5", "reward_last5")),
               ("iterations", str(len(history.iterations))), ("wall time", seconds_text(facts.get("wall_s", 0.0))),
               ("tokens per second", None if throughput is None else f"{throughput:,.0f}")]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b></div>'
        for label, value in entries if value is not None) + "</div>"


def learning_curve(history: RunHistory) -> str:
    accuracy = [(record.result.iteration, record.accuracy) for record in history.iterations
                if record.accuracy is not None]
    heldout = [(record.result.snapshot, record.accuracy) for record in history.validations
               if record.accuracy is not None]
    series = [item for item in (Series("reward", "six", history.values("reward")),
                                Series("accuracy", "one", accuracy),
                                Series("held-out accuracy (greedy)", "two", heldout, dots=True)) if item.points]
    if not series:
        return ""
    return line_chart(series, x_label="iteration", label="Reward and accuracy by iteration") + legend(
        [(item.label, item.colour, item.dots) for item in series])


def timeline(history: RunHistory, baseline: RunHistory | None) -> str:
    groups = [(f"{_schedule(run)}: iteration {record.result.iteration}", lanes)
              for run, record in ((run, _typical(run)) for run in (baseline, history) if run is not None)
              if record is not None and (lanes := _lanes(record))]
    return f'<div class="wide">{gantt(groups, label="What ran when in one iteration")}</div>' + legend(
        [("generate", "one", False), ("trainer prefix", "two", False), ("reference", "five", False),
         ("suffix and backward", "three", False), ("update", "four", False), ("wait for rewards", "six", False)]
    ) if groups else ""


def _schedule(history: RunHistory) -> str:
    return str(history.run.config.get("schedule", "overlap"))


def _typical(history: RunHistory) -> IterationRecord | None:
    """The second iteration: the first also pays for warm-up, and a serial baseline has few."""
    records = history.iterations[:2]
    return records[-1] if records else None


def _lanes(record: IterationRecord) -> list[Lane]:
    rows: dict[str, list[Bar]] = {}
    for span in record.spans:
        if span.span in LANES:
            lane, label, colour = LANES[span.span]
            rows.setdefault(lane, []).append(Bar(label, colour, span.start_s, span.duration_s))
    order = ("rollout", "reference", "trainer", "reward")
    return [Lane(lane, rows[lane]) for lane in order if lane in rows]


def equation(facts: Mapping[str, Any]) -> str:
    overlap = facts.get("overlap")
    if not overlap:
        return ""
    rows = [("decode alone, T<sub>D</sub>", overlap["decode_s"]), ("prefixes alone, T<sub>P</sub>", overlap["prefix_s"]),
            ("the rest, T<sub>post</sub>", overlap["post_s"]),
            ("serial iteration, measured", overlap["serial_s"]),
            ("overlap, predicted without slowdown: max(T<sub>D</sub>, T<sub>P</sub>) + T<sub>post</sub>",
             overlap["predicted_s"]),
            ("decode slower beside prefixes, δ<sub>D</sub>", overlap["decode_slowdown_s"]),
            ("prefixes slower beside decode, δ<sub>P</sub>", overlap["prefix_slowdown_s"]),
            ("overlap, predicted with these slowdowns", overlap["predicted_with_slowdown_s"]),
            ("overlap iteration, measured", overlap["measured_s"])]
    body = "".join(f"<tr><td>{label}</td><td>{value:.3f} s</td></tr>" for label, value in rows)
    return f'<div class="wide"><table>{body}</table></div>'


def time_table(seconds: Mapping[str, float]) -> str:
    longest = max(seconds.values(), default=0.0) or 1.0
    order = [name for name in TIME_LABELS if name in seconds] + [name for name in seconds if name not in TIME_LABELS]
    rows = "".join(
        f"<tr><td>{escape(TIME_LABELS.get(name, name))}</td><td>{seconds[name]:.3f} s</td>"
        f"<td>{100 * seconds[name] / seconds.get('step', longest):.0f}%</td>"
        f'<td class="bar"><div style="width:{100 * seconds[name] / longest:.1f}%"></div></td></tr>' for name in order)
    return (f'<div class="wide"><table><tr><th>span</th><th>mean</th><th>of iteration</th><th></th></tr>{rows}</table>'
            "</div>") if rows else ""


def memory_table(peaks: Sequence[LedgerEntry]) -> str:
    cells: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for entry in peaks:
        row = cells.setdefault((entry.object_class, entry.role, entry.device, entry.residency), {})
        row[entry.phase] = max(row.get(entry.phase, 0), entry.size_bytes)
    phases = [phase for phase in PHASES if any(row.get(phase) for row in cells.values())]
    largest = max((size for row in cells.values() for size in row.values()), default=0) or 1

    def cell(size: int) -> str:
        if not size:
            return "<td>–</td>"
        return f'<td class="filled" style="background-size:{100 * size / largest:.0f}% 100%">{size_text(size)}</td>'

    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(role)}</td><td>{escape(device)}</td><td>{escape(residency)}</td>"
                   + "".join(cell(row.get(phase, 0)) for phase in phases) + "</tr>"
                   for (name, role, device, residency), row in sorted(cells.items(), key=lambda item: -max(item[1].values())))
    heads = "".join(f"<th>{phase.upper()}</th>" for phase in phases)
    return (f'<div class="wide"><table><tr><th>object class</th><th>role</th><th>device</th><th>in</th>{heads}</tr>{rows}'
            "</table></div>") if rows else ""


def notes(history: RunHistory) -> str:
    counted: dict[tuple[str, str], tuple[int, str]] = {}
    for note in history.notes:
        count, _ = counted.get((note.level, note.reason), (0, ""))
        counted[note.level, note.reason] = (count + 1, note.message)
    items = "".join(f"<li>{escape(level)} {escape(reason)}, {count} times: {escape(message)}</li>"
                    for (level, reason), (count, message) in counted.items())
    return f"<ul>{items}</ul>" if items else ""


def configuration(history: RunHistory, facts: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in facts.items() if key not in ("phase_s", "overlap")}
    return (f"<details open><summary>run configuration</summary><pre>{escape(json.dumps(history.run.config, indent=2))}"
            f"</pre></details><details><summary>summary.json</summary>"
            f"<pre>{escape(json.dumps(plain, indent=2, default=str))}</pre></details>")
