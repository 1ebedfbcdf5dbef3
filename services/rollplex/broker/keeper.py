"""The keeper holds a duplicate of every descriptor for the broker's successor; README.md has its frames."""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import time
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.crash_points import crash_point
from rollplex.core.entry import arguments, load_sections, run_service
from rollplex.core.errors import BadInput, Forbidden
from rollplex.rpc.handles import allow_most_fds, check_peer, listen, peer_of, recv_frame, send_frame
from rollplex.rpc.runtime_dir import prepare_runtime_dir

log = logging.getLogger("keeper")
SEND_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.1
NAMED = ("put", "drop")
OPERATIONS = (*NAMED, "take_all", "refill", "refilled")


class Keeper:
    def __init__(self, path: Path) -> None:
        self._records: dict[str, tuple[dict, int | None, int]] = {}
        """Metadata, descriptor, and the refill that it came in."""
        self._refills = 0
        self._listener = listen(path)
        self._connections: dict[int, socket.socket] = {}
        """In the order in which they came."""
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._listener.fileno():
                    try:
                        connection, _ = self._listener.accept()
                    except OSError as error:
                        # Out of descriptors, or whoever asked is gone: what is kept stays kept.
                        log.error("cannot accept a connection: %s", error)
                        time.sleep(ACCEPT_PAUSE_S)
                        continue
                    connection.settimeout(SEND_TIMEOUT_S)
                    self._connections[connection.fileno()] = connection
                    self._poll.register(connection, select.POLLIN)
                elif fd in self._connections:
                    self._serve(self._connections[fd])

    def _serve(self, connection: socket.socket) -> None:
        try:
            check_peer(peer_of(connection))
            frame = recv_frame(connection)
            if frame is None:
                self._close(connection)
            else:
                _check(*frame)
                self._handle(connection, *frame)
        except (ConnectionResetError, BrokenPipeError):
            # The broker died before it read an answer. What it sent before is still to be read.
            return
        except (BadInput, Forbidden, OSError) as error:
            log.warning("connection closed: %s: %s", type(error).__name__, error)
            self._close(connection)

    def _handle(self, connection: socket.socket, message: dict, fd: int | None) -> None:
        op = message.get("op")
        if op == "put":
            crash_point("keeper.put.received")
            self._drop(message["name"])
            self._records[message["name"]] = message["metadata"], fd, self._refills
            crash_point("keeper.put.stored")
        elif op == "drop":
            self._drop(message["name"])
            crash_point("keeper.drop.done")
        elif op == "refilled":
            for name in [name for name, (_, _, refill) in self._records.items() if refill < self._refills]:
                self._drop(name)
        else:
            self._own(connection)
            # Nothing is dropped yet: the broker may die before it has handed over what replaces it.
            self._refills += op == "refill"
            for name, (metadata, kept, _) in self._records.items() if op == "take_all" else ():
                send_frame(connection, {"name": name, "metadata": metadata}, kept)
        send_frame(connection, {"ok": True, "records": len(self._records)})

    def _own(self, connection: socket.socket) -> None:
        """One connection owns the records: what a dead owner had still sent comes first, then it can change nothing. A later one
        takes its own turn: a keeper that was stopped finds several, each with a refill, and the last is the live one."""
        order = list(self._connections.values())
        for other in order[:order.index(connection)]:
            fd = other.fileno()
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            while self._connections.get(fd) is other and waiting.poll(0):
                self._serve(other)
            if self._connections.get(fd) is other:
                self._close(other)

    def _drop(self, name: str) -> None:
        _, fd, _ = self._records.pop(name, ({}, None, 0))
        if fd is not None:
            os.close(fd)

    def _close(self, connection: socket.socket) -> None:
        del self._connections[connection.fileno()]
        self._poll.unregister(connection)
        connection.close()


def _check(message: dict, fd: int | None) -> None:
    """Raises BadInput for a frame that is none of the keeper's; its descriptor is closed then."""
    op, wrong = message.get("op"), ""
    if op not in OPERATIONS:
        wrong = f"unknown operation {op!r:.80}"
    elif op in NAMED and not isinstance(message.get("name"), str):
        wrong = f"{op} without a name"
    elif op == "put" and not isinstance(message.get("metadata"), dict):
        wrong = "put without metadata"
    elif op != "put" and fd is not None:
        wrong = f"{op} takes no descriptor"
    if wrong:
        if fd is not None:
            os.close(fd)
        raise BadInput(wrong, reason="FRAME_MALFORMED")


def main() -> None:
    parsed = arguments("broker.keeper", "Keeps slabs for the broker's successor.").parse_args()
    mesh = load_sections(parsed.config, parsed.overrides, {"mesh": MeshSection})["mesh"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(levelname)s %(message)s")
    allow_most_fds()
    prepare_runtime_dir(mesh.runtime_dir)
    Keeper(mesh.keeper_socket).run()


if __name__ == "__main__":
    sys.exit(run_service(main))
