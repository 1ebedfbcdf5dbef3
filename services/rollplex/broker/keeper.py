"""The keeper: holds a duplicate of every descriptor for the broker's successor. `python -m rollplex.broker.keeper`.

It knows nothing about slabs: records are a name, JSON metadata and perhaps a descriptor. Frames are those of
rollplex.rpc.handles; every request is answered in order. One connection owns the records: the last one that said
`take_all` or `reset`; then all others are closed, so that a broker believed dead can change nothing any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import sys
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.entry import arguments, load_sections, run_service
from rollplex.core.errors import BadInput, Forbidden, RollplexError
from rollplex.rpc.handles import check_peer, error_frame, listen, peer_of, recv_frame, send_frame

log = logging.getLogger("keeper")
SEND_TIMEOUT_S = 5.0


class Keeper:
    def __init__(self, path: Path) -> None:
        self._records: dict[str, tuple[dict, int | None]] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: set[socket.socket] = set()

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._connections:
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_TIMEOUT_S)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            check_peer(peer_of(connection))
        except Forbidden as error:
            self._fail(connection, error)

    def _serve(self, connection: socket.socket) -> None:
        try:
            frame = recv_frame(connection)
            if frame is None:
                self._close(connection)
                return
            self._handle(connection, *frame)
        except (BadInput, KeyError, OSError) as error:
            self._fail(connection, error)

    def _handle(self, connection: socket.socket, message: dict, fd: int | None) -> None:
        op = message.get("op")
        if op != "put" and fd is not None:
            os.close(fd)
        if op == "put":
            self._drop(message["name"])
            self._records[message["name"]] = message["metadata"], fd
        elif op == "drop":
            self._drop(message["name"])
        elif op in ("take_all", "reset"):
            for other in self._connections - {connection}:
                self._close(other)
            for name in list(self._records) if op == "reset" else ():
                self._drop(name)
            for name, (metadata, kept) in self._records.items() if op == "take_all" else ():
                send_frame(connection, {"name": name, "metadata": metadata}, kept)
        else:
            raise BadInput(f"unknown operation {op!r}", reason="UNKNOWN_OPERATION")
        send_frame(connection, {"ok": True, "records": len(self._records)})

    def _drop(self, name: str) -> None:
        _, fd = self._records.pop(name, ({}, None))
        if fd is not None:
            os.close(fd)

    def _fail(self, connection: socket.socket, error: Exception) -> None:
        log.warning("connection closed: %s: %s", type(error).__name__, error)
        if isinstance(error, RollplexError):
            with contextlib.suppress(OSError):
                send_frame(connection, error_frame(error))
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection)
        connection.close()


def main() -> None:
    parsed = arguments("broker.keeper", "Keeps slabs for the broker's successor.").parse_args()
    mesh = load_sections(parsed.config, parsed.overrides, {"mesh": MeshSection})["mesh"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(levelname)s %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    mesh.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    Keeper(mesh.keeper_socket).run()


if __name__ == "__main__":
    sys.exit(run_service(main))
