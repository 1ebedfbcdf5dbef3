"""Which processes the mesh's MPS servers still have as clients. Death is not enough on a GPU: a server goes on with what a dead
client had launched until it has seen it off.

The questions are those of NVIDIA's MPS documentation, "nvidia-cuda-mps-control": `get_server_list`, `get_client_list PID`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollplex.core.config import MeshSection
from rollplex.core.sharing import CONTROL, control_environment

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Of one question; the fence's own deadline bounds all of them."""


class ClientList(Protocol):
    async def has(self, pid: int) -> bool:
        """Whether this process is a client, or may be: nobody says that it is not."""
        ...


class MpsClients:
    """A ClientList of the daemon in one pipe directory."""

    def __init__(self, command: str, pipe_directory: Path) -> None:
        self._command, self._pipe_directory = command, pipe_directory
        self._environment = control_environment(dict(os.environ), pipe_directory)

    async def has(self, pid: int) -> bool:
        if not (self._pipe_directory / "control").exists():
            # The daemon's service takes its servers along, and with them every client.
            return False
        servers = await self._ask("get_server_list")
        if servers is None:
            return True
        for server in _pids(servers):
            clients = await self._ask(f"get_client_list {server}")
            if clients is None or pid in _pids(clients):
                return True
        return False

    async def _ask(self, question: str) -> str | None:
        """None without an answer."""
        try:
            process = await asyncio.create_subprocess_exec(
                self._command, env=self._environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL)
        except OSError as error:
            log.warning("%s cannot be asked: %s", self._command, error)
            return None
        try:
            said, _ = await asyncio.wait_for(process.communicate(question.encode() + b"\n"), ANSWER_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            log.warning("%s does not answer %r", self._command, question)
            return None
        return said.decode(errors="replace") if process.returncode == 0 else None


def _pids(answer: str) -> set[int]:
    return {int(word) for word in answer.split() if word.isdecimal()}


def client_list(mesh: MeshSection, find: Callable[[str], str | None] = shutil.which) -> ClientList | None:
    """None where the mesh's policy has no MPS daemon, or nobody here can ask it."""
    if mesh.policy is None or not mesh.policy.daemon:
        return None
    command = find(CONTROL)
    if command is None:
        log.warning("%s is not on PATH: a dead process's MPS client is not waited for", CONTROL)
        return None
    return MpsClients(command, mesh.mps_pipe_dir)
