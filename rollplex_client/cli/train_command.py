"""train: any checkpoint of a known architecture, any data file of a known format."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput, NotFound, RollplexError
from rollplex_client.cli.artifacts import MetricsFile, write_summary
from rollplex_client.cli.loop import Plan, Refusal, ReplayLoop, TrainingLoop
from rollplex_client.cli.mesh import mesh_for, prepare_runtime_dir
from rollplex_client.cli.mesh_commands import health_display, model_option
from rollplex_client.cli.output import Output
from rollplex_client.cli.programs import SPOOL
from rollplex_client.cli.progress import LiveProgress, Silent
from rollplex_client.cli.settings import Settings, load, merged
from rollplex_client.formatting import seconds_text
from rollplex_client.history import RunHistory, read_history
from rollplex_client.prompts import Prompt, prompt_from_row
from rollplex_client.report import write_report
from rollplex_client.results import Event, Iteration, IterationHandle
from rollplex_client.summary import summary
from rollplex_client.sync import Client


@dataclass(slots=True)
class Rows:
    """What a data file gave."""

    prompts: list[Prompt]
    numbers: list[int] = field(default_factory=list)
    """Row number in the file of every prompt."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """(row number, why)."""


class Recorder:
    """An `Observer` that writes metrics and counts refused prompts, and passes everything on to the display."""

    def __init__(self, display: LiveProgress | Silent, metrics: MetricsFile) -> None:
        self.refused: list[Refusal] = []
        self.retries = 0
        self._display, self._metrics = display, metrics

    def on_submit(self, handle: IterationHandle) -> None:
        self._display.on_submit(handle)

    def on_event(self, event: Event) -> None:
        self._display.on_event(event)

    def on_result(self, result: Iteration) -> None:
        self._metrics.add(result)
        self._display.on_result(result)

    def on_refused(self, refusals: Sequence[Refusal]) -> None:
        self.refused += refusals
        self._display.on_refused(refusals)

    def on_retry(self, error: RollplexError) -> None:
        self.retries += 1
        self._display.on_retry(error)


def train(arguments: argparse.Namespace, output: Output) -> None:
    settings = load(arguments, _options(arguments))
    data, section, replayed = settings.sections["data"], settings.sections["train"], settings.run.replay
    if data.file is None and not replayed:
        raise BadInput("no data: give --data FILE, or file in the [data] section", reason="DATA_MISSING")
    name = section.run or time.strftime("train-%Y%m%d-%H%M%S")
    folder = section.out or Path("runs") / name
    settings = merged(settings, {"coordinator": {"media_roots": media_roots(settings)}, "mesh": _own_replicas(settings)})
    rows, heldout = read_rows(settings, None if replayed else data.file), read_rows(settings, data.heldout)
    _note_refused(output, rows, data.file)
    _note_refused(output, heldout, data.heldout)
    plan = Plan(name, rows.prompts, heldout.prompts, section.iterations, section.groups_per_iteration,
                section.validate_every, section.shuffle, settings.run.seed, rows.numbers, heldout.numbers)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with health_display(output) as on_health:
            stack.enter_context(mesh_for(settings, timeout_s=arguments.timeout, keep_up=arguments.keep_up,
                                         on_health=on_health))
        client = stack.enter_context(Client(settings.coordinator_address))
        recorder = run_plan(client, settings, plan, folder, output, filter_bad=data.filter_bad_rows, resume=section.resume)
        kept = _newest_checkpoint(client, name) if client.get_run(name).config.get("checkpoint_every") else None
        exported = client.export_checkpoint(name, section.export) if section.export else None
        history = read_history(client, name)
    result = {**summary(history, time.monotonic() - began), "rows": len(rows.prompts), "rows_refused": rows.refused,
              "heldout_rows_refused": heldout.refused,
              "prompts_refused": [[item.row, item.reason] for item in recorder.refused],
              "iterations_retried": recorder.retries,
              "export": exported.path if exported else None, "checkpoint": kept}
    finish(output, folder, history, result)


def _newest_checkpoint(client: Client, name: str) -> str | None:
    """Its path, once it is written: a mesh that is stopped meanwhile would give it up."""
    try:
        return client.durable_checkpoint(name).path
    except NotFound:
        return None


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command's options as configuration."""
    data = {"file": arguments.data, "heldout": arguments.heldout, "media_root": arguments.media_root,
            "filter_bad_rows": arguments.filter_bad_rows}
    section = {"run": arguments.run, "iterations": arguments.iterations, "out": arguments.out,
               "groups_per_iteration": arguments.groups_per_iteration, "validate_every": arguments.validate_every,
               "export": arguments.export, "resume": arguments.resume}
    journal = arguments.replay_journal.absolute() if arguments.replay_journal else None
    given = {"data": data, "train": section, "run": {"schedule": arguments.schedule, "replay": arguments.replay,
                                                                "checkpoint_every": arguments.checkpoint_every},
             "coordinator": {"replay_journal": journal}}
    return {**model_option(arguments),
            **{name: {key: value for key, value in values.items() if value is not None}
               for name, values in given.items()}}


def _own_replicas(settings: Settings) -> dict[str, Any]:
    """Schedule `disaggregated` needs rollout on devices of its own: as many replicas as would share, unless a number is
    given."""
    needed = settings.run.schedule == "disaggregated" and not settings.mesh.own_replicas
    return {"own_replicas": settings.mesh.topology.q} if needed else {}


def media_roots(settings: Settings) -> list[str]:
    """The configured roots, and where the data files say their media are."""
    data = settings.sections["data"]
    folders = [data.media_root] if data.media_root else [path.parent for path in (data.file, data.heldout) if path]
    roots = [*settings.sections["coordinator"].media_roots, *folders, settings.mesh.runtime_dir / SPOOL]
    return list(dict.fromkeys(str(Path(root).absolute()) for root in roots))


def read_rows(settings: Settings, path: Path | None) -> Rows:
    """Raises BadInput at the first bad row, unless data.filter_bad_rows."""
    if path is None:
        return Rows([])
    from rollplex.data.datasets import read_dataset

    data = settings.sections["data"]
    spool = settings.mesh.runtime_dir / SPOOL
    prepare_runtime_dir(settings.mesh.runtime_dir)
    spool.mkdir(mode=0o700, exist_ok=True)
    refused: list[tuple[int, str]] | None = [] if data.filter_bad_rows else None
    rows = read_dataset(path, media_root=data.media_root, format=data.format, spool_dir=spool,
                        require_ground_truth=data.require_ground_truth, refused=refused)
    if not rows:
        raise BadInput(f"{path} has no usable row: " + "; ".join(reason for _, reason in (refused or [])[:3]),
                       reason="EMPTY_DATASET", path=path)
    return Rows([prompt_from_row(row) for row in rows], [row.index for row in rows], refused or [])


def _note_refused(output: Output, rows: Rows, path: Path | None) -> None:
    if rows.refused:
        output.note(f"{len(rows.refused)} row(s) of {path} are left out:")
        for index, reason in rows.refused:
            output.note(f"  row {index}: {reason}")


def run_plan(client: Client, settings: Settings, plan: Plan, folder: Path, output: Output, *,
             filter_bad: bool = False, metrics_name: str = "metrics.jsonl", resume: str = "never") -> Recorder:
    """Creates (or continues) the run and carries out the plan. What is done when it is interrupted stays on record.

    `resume`: TrainSection.resume."""
    metrics = MetricsFile(folder / metrics_name)
    # What a replay is not told to do otherwise, it does as the recorded run.
    config = settings.given["run"] if settings.run.replay else settings.run
    run = client.create_run(plan.run, config, resume=resume)
    loop, iterations = TrainingLoop, plan.iterations
    if settings.run.replay:
        loop, iterations = ReplayLoop, min(iterations, run.replay_iterations)
    try:
        with Silent() if output.json else LiveProgress(output.console, plan.run, iterations) as display:
            recorder = Recorder(display, metrics)
            loop(client, dataclasses.replace(plan, iterations=iterations), recorder, filter_bad=filter_bad).train(run)
    finally:
        metrics.close()
    return recorder


def finish(output: Output, folder: Path, history: RunHistory, result: dict[str, Any], *renderables: Any,
           baseline: RunHistory | None = None) -> None:
    """Writes summary.json and report.html and prints the result."""
    report = write_report(folder / "report.html", history, result, baseline)
    result = {**result, "metrics": str(folder / "metrics.jsonl"), "report": str(report)}
    write_summary(folder, result)
    output.result(result, *renderables, *_result_lines(result))


def _result_lines(result: dict[str, Any]) -> list[str]:
    def rise(first: str, last: str) -> str:
        values = [result[key] for key in (first, last)]
        return "not measured" if None in values else f"{values[0]:.3f} -> {values[1]:.3f}"

    return [f"{result['iterations']} iterations in {seconds_text(result['wall_s'])}, schedule {result['schedule']}",
            f"reward {rise('reward_first5', 'reward_last5')}, accuracy {rise('accuracy_first5', 'accuracy_last5')}, "
            f"held-out {rise('heldout_first', 'heldout_last')} (first and last five iterations)",
            f"report: {result['report']}"]
