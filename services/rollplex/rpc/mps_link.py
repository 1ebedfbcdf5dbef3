"""An engine's hold on the mesh's MPS daemon: it waits for it before it touches CUDA, and ends with it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from rollplex.core.config import MeshSection
from rollplex.core.errors import Unavailable, WrongState
from rollplex.core.sharing import PIPE_VARIABLE
from rollplex.rpc.handles import connect
from rollplex.rpc.last_words import end_process

log = logging.getLogger(__name__)

WAIT_S = 60.0
_RETRY_S = 0.05


def hold_daemon(mesh: MeshSection, *, wait_s: float = WAIT_S, end: Callable[[], None] = end_process) -> None:
    """Returns once the daemon takes clients, at once where the policy has none; `end` is called, on a thread, when a server of
    it faults or dies, since then this process's CUDA context is lost.

    Call it before anything of CUDA: a process that comes before the daemon runs without MPS and never says so. Raises
    Unavailable when there is no daemon in time, WrongState when the environment is not the policy's.
    """
    if mesh.policy is None or not mesh.policy.daemon:
        return
    if os.environ.get(PIPE_VARIABLE) != str(mesh.mps_pipe_dir):
        raise WrongState(f"mesh.sharing is {mesh.sharing!r}, but {PIPE_VARIABLE} is {os.environ.get(PIPE_VARIABLE)!r} and not "
                         f"{mesh.mps_pipe_dir}: start this service with `rollplex up`, which sets it, or set mesh.sharing = "
                         "\"time-slice\"", reason="MPS_ENVIRONMENT", sharing=mesh.sharing)
    link = _admitted(mesh, time.monotonic() + wait_s, wait_s)
    threading.Thread(target=_follow, args=(link, end), name="mps-link", daemon=True).start()


def _admitted(mesh: MeshSection, deadline: float, wait_s: float) -> socket.socket:
    while True:
        try:
            return _admission(mesh, max(deadline - time.monotonic(), _RETRY_S))
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"no MPS daemon took this client on {mesh.mps_socket} within {wait_s:.0f} s: {error}; "
                                  "`rollplex up` starts it, `rollplex logs mps` has its words", reason="MPS_DOWN") from error
        time.sleep(_RETRY_S)


def _admission(mesh: MeshSection, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    link = connect(mesh.mps_socket, timeout_s=timeout_s)
    try:
        if not link.recv(1):
            raise ConnectionResetError("the daemon's service closed the connection")
        link.settimeout(None)
    except OSError:
        link.close()
        raise
    return link


def _follow(link: socket.socket, end: Callable[[], None]) -> None:
    with link:
        try:
            link.recv(1)
        except OSError as error:
            log.info("mps link: %s", error)
    log.critical("the MPS server of this mesh has a fault or is gone, and this process's CUDA context with it; it ends here")
    end()
