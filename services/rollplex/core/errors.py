"""What can go wrong, by kind. `rollplex.rpc.status` maps each kind to a gRPC code; docs/errors.md says what recovers it.

A user's mistake stays a `ValueError`: `BadInput` is one, with a machine-readable reason.
"""

from __future__ import annotations


class RollplexError(Exception):
    """Base: a message for people, a `reason` in UPPER_SNAKE for programs, `metadata` with the numbers."""

    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason
        self.metadata = {key: str(value) for key, value in metadata.items()}


class BadInput(RollplexError, ValueError):
    """INVALID_ARGUMENT: the request itself is wrong; correct it and send it again."""

    default_reason = "BAD_INPUT"


class NotFound(RollplexError):
    """NOT_FOUND: no such run, slab, lease or command."""

    default_reason = "NOT_FOUND"


class AlreadyExists(RollplexError):
    """ALREADY_EXISTS: the name is taken by something with another content."""

    default_reason = "ALREADY_EXISTS"


class WrongState(RollplexError):
    """FAILED_PRECONDITION: wrong phase, stale snapshot, stale epoch."""

    default_reason = "WRONG_STATE"


class OutOfMemory(RollplexError):
    """RESOURCE_EXHAUSTED: device memory, pinned pool or a limit; the message carries the ledger's table."""

    default_reason = "OUT_OF_MEMORY"


class Unavailable(RollplexError):
    """UNAVAILABLE: loading, draining or not there; the same call may succeed later."""

    default_reason = "UNAVAILABLE"


class DeadlineExceeded(RollplexError):
    """DEADLINE_EXCEEDED: the work did not end in the time it was given."""

    default_reason = "DEADLINE_EXCEEDED"


class Aborted(RollplexError):
    """ABORTED: given up on request, or because a peer died."""

    default_reason = "ABORTED"


class Forbidden(RollplexError):
    """PERMISSION_DENIED: another uid, a forged ticket, a path outside the allowed roots."""

    default_reason = "FORBIDDEN"


class DataLoss(RollplexError):
    """DATA_LOSS: bytes are not what their hash or their seal says."""

    default_reason = "DATA_LOSS"


class InternalError(RollplexError):
    """INTERNAL: an invariant of ours does not hold."""


def as_domain_error(error: BaseException) -> RollplexError:
    """Any exception as one of ours: a ValueError is the user's, anything else an INTERNAL that keeps its type's name."""
    if isinstance(error, RollplexError):
        return error
    if isinstance(error, ValueError):
        return BadInput(str(error))
    return InternalError(f"{type(error).__name__}: {error}")
