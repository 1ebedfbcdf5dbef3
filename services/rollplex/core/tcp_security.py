"""What a TCP address needs before anybody serves or calls it: TLS, and a token that all of the mesh share.

The process's environment holds the paths (never what is in them), so that a config's keys reach a service's own children.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.core.strict import parse

TOKEN_CHARACTERS = (32, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSecurity:
    """The keys of [mesh] that are about TCP; `config.MeshSection` says what each is."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure_tcp: bool = False

    @classmethod
    def current(cls) -> TcpSecurity:
        """This process's, from ROLLPLEX_TLS_CERT, _TLS_KEY, _TLS_CA, _TOKEN_FILE and _INSECURE_TCP (1: true)."""
        found = {item.name: os.environ.get(_variable(item.name), "") for item in fields(cls)}
        insecure = found.pop("insecure_tcp")
        return cls(**{name: Path(value) for name, value in found.items() if value}, insecure_tcp=insecure == "1")

    @classmethod
    def use(cls, mesh: dict[str, Any]) -> None:
        """Makes what a [mesh] table says of it this process's; what it leaves unset stays as the environment has it."""
        given = parse(cls, {item.name: mesh[item.name] for item in fields(cls) if item.name in mesh}, "mesh")
        for item in fields(cls):
            value = getattr(given, item.name)
            if value:
                os.environ[_variable(item.name)] = str(value.absolute()) if isinstance(value, Path) else "1"

    def secures(self, address: str, *, serving: bool) -> bool:
        """Whether `address` goes by TLS and token. False for Unix sockets, and where plain TCP is allowed.

        Raises BadInput (TCP_INSECURE) for a TCP address that has neither the one nor the other.
        """
        if address.startswith("unix:"):
            return False
        needed = ("tls_cert", "tls_key", "token_file") if serving else ("tls_ca", "token_file")
        missing = [name for name in needed if getattr(self, name) is None]
        if not missing:
            return True
        if self.insecure_tcp and is_loopback(address):
            return False
        names = ", ".join(f"mesh.{name} ({_variable(name)})" for name in missing)
        hint = ("; or set mesh.insecure_tcp = true, which lets in every user of this machine" if is_loopback(address)
                else "; mesh.insecure_tcp is for loopback addresses only" if self.insecure_tcp else "")
        raise BadInput(f"{'serving' if serving else 'calling'} TCP address {address} needs TLS and a token: {names} not set. "
                       f"Use a Unix socket (unix:/path) on one machine{hint}", reason="TCP_INSECURE", address=address)

    def token(self) -> str:
        """The token, which nothing may print. Raises BadInput for a file that others may read or that holds no token."""
        assert self.token_file is not None
        text = read_private(self.token_file, "token_file").decode(errors="replace").strip()
        low, high = TOKEN_CHARACTERS
        if not low <= len(text) <= high or not text.isascii() or not text.isprintable() or " " in text:
            raise BadInput(f"{self.token_file} (token_file) must hold {low} to {high} printable ASCII characters without spaces, "
                           "as in: openssl rand -hex 32", reason="BAD_TOKEN_FILE", path=self.token_file)
        return text


def is_loopback(address: str) -> bool:
    """Whether `host:port` can be reached from this machine only; a name other than localhost is not asked for."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_private(path: Path, key: str) -> bytes:
    """A secret's bytes. Raises BadInput unless it is a file that only its owner, who we are, may read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
                raise BadInput(f"{path} ({key}) must be a file of your own that others cannot read: chmod 600",
                               reason="SECRET_OPEN", path=path)
            return file.read()
    except OSError as error:
        raise BadInput(f"{path} ({key}) cannot be read: {error.strerror}", reason="SECRET_MISSING", path=path) from error


def _variable(name: str) -> str:
    return f"ROLLPLEX_{name.upper()}"
