"""up, down, status."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from rollplex.core.errors import RollplexError
from rollplex_client.cli import mesh, programs
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import Settings, load
from rollplex_client.cli.supervision import Supervisor
from rollplex_client.formatting import seconds_text, size_text
from rollplex_client.results import LedgerEntry, Mesh
from rollplex_client.sync import Client

STATUS_TIMEOUT_S = 5.0


def model_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Services have other working directories than the user: the path is made absolute."""
    return {"model": {"checkpoint": str(arguments.model.absolute())}} if arguments.model else {}


def up(arguments: argparse.Namespace, output: Output) -> None:
    settings = load(arguments, model_option(arguments))
    with health_display(output) as on_health:
        supervisor = mesh.bring_up(settings, timeout_s=arguments.timeout, on_health=on_health)
    names = supervisor.names()
    output.result({"runtime_dir": str(settings.mesh.runtime_dir), "pid": supervisor.pid(), "services": names,
                   "coordinator": settings.coordinator_address},
                  f"{len(names)} services are up in {settings.mesh.runtime_dir}; clients: {settings.coordinator_address}")


def down(arguments: argparse.Namespace, output: Output) -> None:
    settings = mesh.as_running(load(arguments))
    supervisor = Supervisor(settings.mesh.runtime_dir)
    names = supervisor.names()
    output.note(f"stopping {', '.join(names)}")
    pid = supervisor.shut_down(mesh.stop_timeout_s(settings))
    output.result({"stopped": names, "pid": pid}, f"{len(names)} services have stopped")


@contextlib.contextmanager
def health_display(output: Output) -> Iterator[mesh.OnHealth]:
    """One live line of services that serve and are awaited."""
    if output.json:
        yield lambda health: None
        return
    with output.console.status("starting") as line:
        def show(health: dict[str, str]) -> None:
            marks = (f"[green]{name}[/]" if state == "SERVING" else f"[dim]{name}[/]" for name, state in health.items())
            line.update(f"{sum(state == 'SERVING' for state in health.values())} of {len(health)} serve: "
                        + " ".join(marks))

        yield show


def status(arguments: argparse.Namespace, output: Output) -> int:
    """Exit status 1 when a service does not serve."""
    settings = mesh.as_running(load(arguments))
    processes = Supervisor(settings.mesh.runtime_dir).processes()
    probe = mesh.HealthProbe(settings)
    try:
        health = probe.ask()
    finally:
        probe.close()
    state, problem = _coordinator_view(settings)
    snapshots = {item.name: item.bound_snapshot for item in state.services} if state else {}
    rows = [{"name": item.name, "state": item.state, "pid": item.pid, "uptime_s": item.uptime_s,
             "health": health.get(item.name, "UNKNOWN"), "snapshot": snapshots.get(item.name, -1)}
            for item in processes]
    sharing = _sharing(settings, health)
    data = {"services": rows, "sharing": sharing, "phase": state.phase if state else None,
            "open_run": state.open_run if state else None,
            "ledger": [dataclasses.asdict(row) for row in state.ledger] if state else [],
            "host_slab_bytes": state.host_slab_bytes if state else None, "coordinator_error": problem}
    output.result(data, *_status_tables(rows, sharing, state, problem))
    return 0 if all(row["health"] == "SERVING" for row in rows) else 1


def _sharing(settings: Settings, health: dict[str, str]) -> dict[str, Any] | None:
    """The policy and its daemon's health; None on the host."""
    mesh_section = settings.mesh
    if mesh_section.policy is None:
        return None
    daemon = health.get(programs.MPS, "UNKNOWN") if mesh_section.policy.daemon else None
    return {"policy": mesh_section.sharing, "prefix_sm_percent": mesh_section.prefix_percent, "daemon": daemon}


def _coordinator_view(settings: Settings) -> tuple[Mesh | None, str]:
    with Client(settings.coordinator_address) as client:
        try:
            return client.mesh(timeout_s=STATUS_TIMEOUT_S), ""
        except RollplexError as error:
            return None, str(error)


def _status_tables(rows: list[dict[str, Any]], sharing: dict[str, Any] | None, state: Mesh | None, problem: str) -> list[Any]:
    from rich.table import Table

    table = Table("service", "state", "pid", "up", "health", "snapshot", box=None, pad_edge=False)
    for row in rows:
        colour = "green" if row["health"] == "SERVING" else "red"
        table.add_row(row["name"], row["state"].lower(), str(row["pid"] or "-"), seconds_text(row["uptime_s"]),
                      f"[{colour}]{row['health']}[/]", "-" if row["snapshot"] < 0 else str(row["snapshot"]))
    shown: list[Any] = [table]
    if sharing is not None:
        shown.append(f"\nGPU sharing: {sharing['policy']}, MPS daemon {sharing['daemon'] or 'not used'}")
    if state is None:
        return [*shown, f"\nthe coordinator does not answer: {problem}"]
    shown.append(f"\nphase {state.phase}, run {state.open_run or 'none'}")
    if state.ledger:
        shown.append(ledger_table(state.ledger))
        shown.append(f"host bytes in slabs: {size_text(state.host_slab_bytes)}")
    return shown


def ledger_table(entries: tuple[LedgerEntry, ...]) -> Any:
    from rich.table import Table

    table = Table("object class", "role", "device", "bytes", "slabs", box=None, pad_edge=False)
    for entry in entries:
        table.add_row(entry.object_class, entry.role, entry.device, size_text(entry.size_bytes), str(entry.slab_count))
    return table
