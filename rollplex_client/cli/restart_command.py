"""restart: swaps in edited code, between updates, and says what no longer fits the mesh."""

from __future__ import annotations

import argparse
import time

from rollplex.core.compatibility import Description, mismatch, unlike
from rollplex.core.errors import DeadlineExceeded, NotFound, RollplexError, Unavailable
from rollplex.rpc.channel import sync_channel
from rollplex.rpc.describe import describe_sync
from rollplex_client.cli import mesh, programs
from rollplex_client.cli.mesh_commands import health_display
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import Settings, load
from rollplex_client.cli.supervision import Supervisor
from rollplex_client.sync import Client

ASK_TIMEOUT_S = 5.0
POLL_S = 0.2


def restart(arguments: argparse.Namespace, output: Output) -> None:
    settings = mesh.as_running(load(arguments))
    supervisor = Supervisor(settings.mesh.runtime_dir)
    names = supervisor.names()
    if arguments.service not in names:
        raise NotFound(f"the mesh has no service {arguments.service!r}; it has {', '.join(names)}", reason="NO_SUCH_SERVICE",
                       service=arguments.service)
    if not arguments.force:
        wait_for_update(settings, arguments.service, arguments.timeout, output)
    supervisor.restart(arguments.service)
    with health_display(output) as on_health:
        mesh.wait_until_serving(settings, supervisor, timeout_s=arguments.timeout, on_health=on_health, only=arguments.service)
    process = next(item for item in supervisor.processes() if item.name == arguments.service)
    compared = check_fits_mesh(settings, arguments.service)
    output.result({"service": process.name, "pid": process.pid, "compared_with": compared},
                  f"{process.name} serves again, pid {process.pid}" + (
                      f"; protos, configuration and layout agree with {', '.join(compared)}" if compared else ""))


def wait_for_update(settings: Settings, service: str, timeout_s: float, output: Output) -> None:
    """Returns once no UPDATE runs, or nobody can say. Raises DeadlineExceeded when one still runs after `timeout_s`."""
    deadline, noted = time.monotonic() + timeout_s, False
    with Client(settings.coordinator_address) as client:
        while True:
            try:
                if client.mesh(timeout_s=ASK_TIMEOUT_S).phase != "update":
                    return
            except RollplexError:
                # A coordinator that is down, or as silent as what is to be restarted, has no update that could be hurt more.
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"an UPDATE still runs after {timeout_s:g} s; {service} was left alone. Wait, or "
                                       "restart it all the same with --force: the update is then rolled forward",
                                       reason="UPDATE_RUNS", service=service)
            if not noted:
                output.note(f"an UPDATE runs; {service} is restarted when it has ended (--force: at once)")
                noted = True
            time.sleep(POLL_S)


def check_fits_mesh(settings: Settings, service: str) -> list[str]:
    """The services with which `service` agrees. Raises WrongState naming what differs, as the coordinator will before it gives it
    work."""
    names = [program.name for program in programs.programs(settings) if program.serves_grpc]
    if service not in names:
        return []
    asked = _describe(settings, service)
    compared = []
    # The coordinator is what refuses.
    for name in sorted((name for name in names if name != service), key=lambda name: name != "coordinator"):
        try:
            other = _describe(settings, name)
        except Unavailable:
            continue
        if subject := unlike(other, asked):
            raise mismatch(subject, other, asked)
        compared.append(name)
    return compared


def _describe(settings: Settings, name: str) -> Description:
    with sync_channel(settings.mesh.address(name)) as channel:
        return describe_sync(name, channel, ASK_TIMEOUT_S)
