"""Channels with one set of options, for asyncio and for threads."""

from __future__ import annotations

import grpc
from grpc import aio

from rollplex.core.errors import BadInput
from rollplex.rpc.credentials import client_side

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 256 * 2**10

OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Errors travel in trailers, with texts that name every prompt that was refused.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # A restarted service comes back on the same socket within a second; the default back-off would wait for a minute.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # How long an attempt may last. A socket that nobody listens on refuses at once; a service of a busy machine greets late.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # Channels of one process to one address would otherwise share a connection that outlives a closed channel.
    ("grpc.use_local_subchannel_pool", 1),
)

# TLS over a network takes longer to come up than a Unix socket.
TCP_OPTIONS = (*(option for option in OPTIONS if option[0] != "grpc.min_reconnect_backoff_ms"),
               ("grpc.min_reconnect_backoff_ms", 5000))


def check_address(address: str) -> str:
    """`unix:/path` or `host:port`. Raises BadInput otherwise."""
    if address.startswith("unix:/"):
        if len(address.removeprefix("unix:").encode()) > 107:
            raise BadInput(f"socket path of {address!r} is longer than the 107 bytes that Linux allows; use a shorter "
                           "runtime directory", reason="SOCKET_PATH_TOO_LONG")
        return address
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise BadInput(f"address {address!r} must be unix:/path or host:port", reason="BAD_ADDRESS")
    return address


def aio_channel(address: str) -> aio.Channel:
    """Raises BadInput for a TCP address without TLS and token (`core.tcp_security`)."""
    credentials = client_side(check_address(address))
    if credentials is None:
        return aio.insecure_channel(address, options=OPTIONS)
    return aio.secure_channel(address, credentials, options=TCP_OPTIONS)


def sync_channel(address: str) -> grpc.Channel:
    """As `aio_channel`."""
    credentials = client_side(check_address(address))
    if credentials is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, credentials, options=TCP_OPTIONS)
