"""Which processes a mesh consists of, and the supervisor's configuration that runs them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.core.sharing import environment
from rollplex.core.strict import to_toml
from rollplex_client.cli.settings import Settings

EFFECTIVE_CONFIG = "effective.toml"
SUPERVISOR_CONFIG = "supervisord.conf"
SUPERVISOR_SOCKET = "supervisor.sock"
SUPERVISOR_PID = "supervisord.pid"
SUPERVISOR_LOG = "supervisord.log"
SPOOL = "spool"
"""Where media that are embedded in a data file are written, inside the runtime directory."""
CUSTODY = ("keeper", "broker")
"""They stop last: engines give their slabs back when they end."""
MPS = "mps"
"""It stops with them: engines compute until they end."""
WATCHDOG = "watchdog"
NO_MODULES: Mapping[str, str] = MappingProxyType({})

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STOP_MARGIN_S = 5


@dataclass(frozen=True, slots=True)
class Program:
    """One supervised process."""

    name: str
    """As in `rollplex status`, the log's name and the mesh's addresses."""
    module: str
    section: str
    """Its section of the configuration."""
    arguments: tuple[str, ...] = ()
    serves_grpc: bool = True


RANK_OPTIONS = {"trainer": "--rank", "reference": "--rank", "rollout": "--replica"}
CLIENT_SECTIONS = ("data", "train")


def programs(settings: Settings) -> list[Program]:
    """In starting order; they stop in the opposite one."""
    coordinator = settings.sections["coordinator"]
    wanted = [Program("keeper", "rollplex.broker.keeper", "broker", serves_grpc=False),
              Program("broker", "rollplex.broker", "broker")]
    if settings.mesh.policy is not None and settings.mesh.policy.daemon:
        wanted.append(Program(MPS, "rollplex_client.cli.mps_service", "mesh", serves_grpc=False))
    for role, option in RANK_OPTIONS.items():
        # Rank 0 is the default of every entry point.
        wanted += [Program(f"{role}-{rank}", f"rollplex.{role}", role, (option, str(rank)) if rank else ())
                   for rank in range(settings.mesh.ranks(role))]
    if coordinator.builtin_reward:
        wanted.append(Program("reward", "rollplex.reward", "reward"))
    wanted.append(Program("coordinator", "rollplex.coordinator", "coordinator"))
    if settings.mesh.stall_timeout_s or settings.mesh.hang_timeout_s:
        wanted.append(Program(WATCHDOG, "rollplex_client.cli.watchdog", "mesh", serves_grpc=False))
    return wanted


def service_config(settings: Settings) -> dict[str, Any]:
    """What the services read; embedded media are readable on every mesh.

    Raises BadInput where two sections contradict each other.
    """
    given, address = settings.sections["reward"].address, settings.mesh.address("reward")
    if given not in (None, address):
        raise BadInput(f"reward.address is {given}, but the mesh looks for it at {address}; write "
                       "mesh.addresses = [\"reward=...\"] instead", reason="BAD_CONFIG")
    plain = {name: section for name, section in settings.plain().items() if name not in CLIENT_SECTIONS}
    spool = str(settings.mesh.runtime_dir / SPOOL)
    roots = [root for root in plain["coordinator"]["media_roots"] if root != spool]
    return plain | {"coordinator": plain["coordinator"] | {"media_roots": [*roots, spool]}}


def log_path(runtime_dir: Path, name: str) -> Path:
    return runtime_dir / "logs" / f"{name}.log"


def write_files(settings: Settings, modules: Mapping[str, str] = NO_MODULES) -> Path:
    """Writes effective.toml and supervisord.conf into the runtime directory; returns the latter. `modules`: what programs run
    instead of their own, by name."""
    runtime_dir = settings.mesh.runtime_dir
    (runtime_dir / "logs").mkdir(mode=0o700, exist_ok=True)
    (runtime_dir / EFFECTIVE_CONFIG).write_text(to_toml(service_config(settings)))
    path = runtime_dir / SUPERVISOR_CONFIG
    path.write_text(supervisor_config(settings, modules))
    return path


def supervisor_config(settings: Settings, modules: Mapping[str, str] = NO_MODULES) -> str:
    """The text of supervisord.conf."""
    runtime_dir = settings.mesh.runtime_dir
    sections = [
        ("unix_http_server", {"file": runtime_dir / SUPERVISOR_SOCKET, "chmod": "0700"}),
        ("supervisord", {"logfile": runtime_dir / SUPERVISOR_LOG, "pidfile": runtime_dir / SUPERVISOR_PID,
                         "childlogdir": runtime_dir / "logs", "umask": "077", "identifier": "rollplex"}),
        ("rpcinterface:supervisor",
         {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"}),
    ]
    names = [program.name for program in programs(settings)]
    # Supervisor stops one group after the other, the highest priority first, and the programs of a group together.
    last = (*CUSTODY, MPS)
    sections += [(f"group:{group}", {"programs": ",".join(members), "priority": priority}) for group, priority, members in
                 (("custody", 1, [name for name in names if name in last]),
                  ("work", 2, [name for name in names if name not in last]))]
    sections += [(f"program:{program.name}", _program_options(
        settings, replace(program, module=modules.get(program.name, program.module)), order))
                 for order, program in enumerate(programs(settings))]
    return "\n".join(f"[{name}]\n" + "".join(f"{key}={_escape(value)}\n" for key, value in options.items())
                     for name, options in sections)


def _program_options(settings: Settings, program: Program, order: int) -> dict[str, Any]:
    runtime_dir = settings.mesh.runtime_dir
    command = [sys.executable, "-m", program.module, "--config", str(runtime_dir / EFFECTIVE_CONFIG), *program.arguments]
    return {
        "command": shlex.join(command), "priority": order, "autostart": "true", "autorestart": "true",
        "startsecs": 2, "startretries": 5, "stopsignal": "TERM",
        "stopwaitsecs": round(settings.mesh.drain_timeout_s) + STOP_MARGIN_S, "killasgroup": "true",
        "directory": Path.cwd(), "redirect_stderr": "true", "stdout_logfile": log_path(runtime_dir, program.name),
        "stdout_logfile_maxbytes": "50MB", "stdout_logfile_backups": 2, "environment": _environment(settings, program),
    }


def _environment(settings: Settings, program: Program) -> str:
    """A section's `threads` bound the numeric libraries too, unless the user's own environment says otherwise; the policy of
    sharing has the last word on its own."""
    threads = getattr(settings.sections[program.section], "threads", 1)
    variables = {name: os.environ.get(name, str(threads)) for name in THREAD_VARIABLES}
    variables |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    mesh = settings.mesh
    if mesh.policy is not None:
        variables |= environment(mesh.policy, program.section, pipe_directory=mesh.mps_pipe_dir,
                                 prefix_sm_percent=mesh.prefix_percent)
    return ",".join(f'{name}="{value}"' for name, value in variables.items())


def _escape(value: object) -> str:
    return str(value).replace("%", "%%")
