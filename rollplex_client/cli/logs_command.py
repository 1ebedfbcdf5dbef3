"""logs: the end of the services' logs, and what follows."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rollplex.core.errors import NotFound
from rollplex_client.cli.mesh import last_lines
from rollplex_client.cli.output import Output
from rollplex_client.cli.programs import log_path
from rollplex_client.cli.settings import load

FOLLOW_POLL_S = 0.2


def logs(arguments: argparse.Namespace, output: Output) -> None:
    """Works on a mesh that is down too. Raises NotFound, naming the logs there are."""
    runtime_dir = load(arguments).mesh.runtime_dir
    names = sorted(path.stem for path in (runtime_dir / "logs").glob("*.log"))
    if arguments.service:
        if arguments.service not in names:
            known = ", ".join(names) or "none yet"
            raise NotFound(f"no log of {arguments.service!r} in {runtime_dir}; there are: {known}", reason="NO_LOG")
        names = [arguments.service]
    elif not names:
        raise NotFound(f"no logs in {runtime_dir}; nothing was started there", reason="NO_LOG")
    paths = {name: log_path(runtime_dir, name) for name in names}
    ends = {name: path.stat().st_size for name, path in paths.items()}
    lines = {name: last_lines(path, arguments.lines) for name, path in paths.items()}
    if output.json and not arguments.follow:
        output.result({"logs": lines})
        return
    for name in names:
        for line in lines[name]:
            _print(output, name, line, many=len(names) > 1)
    if arguments.follow:
        _follow(output, paths, ends)


def _print(output: Output, name: str, line: str, *, many: bool) -> None:
    if output.json:
        print(json.dumps({"service": name, "line": line}), flush=True)
    else:
        print(f"{name:>12} | {line}" if many else line, flush=True)


def _follow(output: Output, paths: dict[str, Path], ends: dict[str, int]) -> None:
    while True:
        for name, path in paths.items():
            size = path.stat().st_size if path.exists() else 0
            if size < ends[name]:
                ends[name] = 0
            if size == ends[name]:
                continue
            with path.open("rb") as file:
                file.seek(ends[name])
                text = file.read()
            complete = text.rfind(b"\n") + 1
            ends[name] += complete
            for line in text[:complete].decode(errors="replace").splitlines():
                _print(output, name, line, many=len(paths) > 1)
        time.sleep(FOLLOW_POLL_S)
