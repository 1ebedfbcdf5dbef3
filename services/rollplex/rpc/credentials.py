"""gRPC credentials of TCP addresses: the server's certificate and the mesh's bearer token, by `core.tcp_security`."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

import grpc

from rollplex.core.errors import BadInput
from rollplex.core.tcp_security import TcpSecurity, read_private

HEADER = "authorization"


class Token:
    """What a server compares with. It has no readable representation."""

    __slots__ = ("_expected",)

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def accepts(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call's metadata carry it, once. The time that it takes says nothing about where the two differ."""
        given = [value.encode() if isinstance(value, str) else value for key, value in metadata or () if key == HEADER]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def server_side(address: str) -> tuple[grpc.ServerCredentials, Token] | None:
    """None for addresses that need none. Raises BadInput for TCP without TLS and token, and for unusable files."""
    security = TcpSecurity.current()
    if not security.secures(address, serving=True):
        return None
    assert security.tls_cert is not None and security.tls_key is not None
    key, certificate = read_private(security.tls_key, "tls_key"), _read(security.tls_cert, "tls_cert")
    return grpc.ssl_server_credentials([(key, certificate)]), Token(security.token())


def client_side(address: str) -> grpc.ChannelCredentials | None:
    """As `server_side`. The server must show a certificate for the address's host, signed by `tls_ca`."""
    security = TcpSecurity.current()
    if not security.secures(address, serving=False):
        return None
    assert security.tls_ca is not None
    return grpc.composite_channel_credentials(grpc.ssl_channel_credentials(_read(security.tls_ca, "tls_ca")),
                                              grpc.access_token_call_credentials(security.token()))


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} ({key}) cannot be read: {error.strerror}", reason="SECRET_MISSING", path=path) from error
