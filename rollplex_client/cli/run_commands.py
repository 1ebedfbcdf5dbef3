"""runs, samples, report, export: what the journal knows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from rollplex.core.errors import Unavailable
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import load
from rollplex_client.formatting import size_text
from rollplex_client.history import read_history
from rollplex_client.report import write_report
from rollplex_client.results import Sample
from rollplex_client.summary import summary
from rollplex_client.sync import Client


@contextmanager
def coordinator(arguments: argparse.Namespace) -> Iterator[Client]:
    """Raises Unavailable in words that help when nobody listens there."""
    address = load(arguments).coordinator_address
    with Client(address) as client:
        try:
            yield client
        except Unavailable as error:
            if error.reason != Unavailable.default_reason:
                raise
            raise Unavailable(f"no coordinator answers at {address}; `rollplex up` starts a mesh, `rollplex status` "
                              f"shows one", reason="COORDINATOR_UNREACHABLE", address=address) from error


def runs(arguments: argparse.Namespace, output: Output) -> None:
    from rich.table import Table

    with coordinator(arguments) as client:
        found = client.list_runs()
    table = Table("run", "state", "iterations", "snapshot", "schedule", "created", box=None, pad_edge=False)
    for run in found:
        table.add_row(run.name, run.state, str(run.next_iteration), str(run.snapshot), run.config.get("schedule", ""),
                      f"{run.create_time:%Y-%m-%d %H:%M:%S}" if run.create_time else "")
    output.result({"runs": [dataclasses.asdict(run) for run in found]}, table if found else "no runs")


def samples(arguments: argparse.Namespace, output: Output) -> None:
    with coordinator(arguments) as client:
        found = client.list_samples(arguments.run, arguments.iteration, validation=arguments.validation)
    output.result({"samples": [dataclasses.asdict(sample) for sample in found]}, *map(_sample_text, found))


def _sample_text(sample: Sample) -> str:
    from rich.markup import escape

    reward = "unscored" if sample.reward is None else f"reward {sample.reward:.3f}"
    advantage = "" if sample.advantage is None else f", advantage {sample.advantage:+.3f}"
    return (f"[bold]group {sample.group_index}, sample {sample.sample_index}[/]: {reward}{advantage}, "
            f"{len(sample.token_ids)} tokens, {sample.finish_reason}\n{escape(sample.response_text)}\n")


def report(arguments: argparse.Namespace, output: Output) -> None:
    with coordinator(arguments) as client:
        history = read_history(client, arguments.run)
    times = [stamp for record in history.iterations for stamp in (record.result.create_time, record.result.end_time)
             if stamp]
    wall_s = (max(times) - min(times)).total_seconds() if times else 0.0
    path = write_report(arguments.out, history, summary(history, wall_s))
    output.result({"run": arguments.run, "report": str(path)}, f"report: {path}")


def export(arguments: argparse.Namespace, output: Output) -> None:
    with coordinator(arguments) as client:
        written = client.export_checkpoint(arguments.run, arguments.directory)
    output.result({"path": written.path, "size_bytes": written.size_bytes},
                  f"{size_text(written.size_bytes)} written to {written.path}")
