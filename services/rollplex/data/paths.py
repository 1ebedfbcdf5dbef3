"""Media paths: only regular files inside the allowed roots are opened, whatever a dataset says."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rollplex.core.errors import BadInput, Forbidden


def resolve_media(path: str | Path, roots: Sequence[Path], *, max_file_bytes: int | None = None) -> Path:
    """The real path, symbolic links followed. Raises Forbidden or BadInput as `open_media` does."""
    real = _inside_roots(path, roots)
    try:
        status = real.stat()
    except OSError as error:
        raise _unusable(path, error) from error
    _check_status(path, status, max_file_bytes)
    return real


def open_media(path: str | Path, roots: Sequence[Path], *, max_file_bytes: int | None = None) -> int:
    """An O_RDONLY descriptor of the file; the caller closes it.

    Raises Forbidden when the real path lies in none of `roots`; BadInput when it is missing, not a regular file, empty,
    larger than `max_file_bytes`, or replaced by a link between check and open.
    """
    real = _inside_roots(path, roots)
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer; regular files ignore it.
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        # A parent folder may have become a link after the check: what counts is the file that was opened.
        _inside_roots(Path(f"/proc/self/fd/{fd}").readlink(), roots)
        _check_status(path, os.fstat(fd), max_file_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _inside_roots(path: str | Path, roots: Sequence[Path]) -> Path:
    if not str(path) or "\0" in str(path):
        raise BadInput(f"media path {str(path)!r} is empty or has a NUL byte", reason="MEDIA_MISSING", path=path)
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        allowed = ", ".join(str(root) for root in roots) or "(none)"
        target = "" if str(real) == str(path) else f" (really {real})"
        raise Forbidden(
            f"media path {path}{target} lies outside the allowed roots: {allowed}",
            reason="MEDIA_OUTSIDE_ROOTS",
            path=path,
            roots=allowed,
        )
    return real


def _check_status(path: str | Path, status: os.stat_result, max_file_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"media path {path} is not a regular file", reason="MEDIA_UNREADABLE", path=path)
    if status.st_size == 0:
        raise BadInput(f"media file {path} is empty (0 bytes)", reason="MEDIA_EMPTY", path=path)
    if max_file_bytes is not None and status.st_size > max_file_bytes:
        raise BadInput(
            f"media file {path} has {status.st_size} bytes, the limit is {max_file_bytes} (max_file_bytes)",
            reason="MEDIA_TOO_LARGE",
            path=path,
            size_bytes=status.st_size,
            limit_bytes=max_file_bytes,
        )


def _unusable(path: str | Path, error: OSError) -> BadInput:
    reason = "MEDIA_MISSING" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else "MEDIA_UNREADABLE"
    return BadInput(f"media file {path} cannot be opened: {error.strerror}", reason=reason, path=path)
