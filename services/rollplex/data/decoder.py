"""The pool of decoding children. One prompt's media in, one sealed memfd out; a bad file costs a child at most."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput, DeadlineExceeded, InternalError, Unavailable
from rollplex.data import plan
from rollplex.data.decode_process import ChildDied, DecodeProcess
from rollplex.data.limits import MediaLimits
from rollplex.data.media import SLAB_SEALS, DecodedMedia, MediaItem
from rollplex.data.paths import open_media
from rollplex.data.rows import MediaRef

log = logging.getLogger(__name__)


class MediaDecoder:
    """`workers` children decode as many prompts at a time; further callers wait in order."""

    def __init__(self, workers: int = 2) -> None:
        if workers < 1:
            raise BadInput(f"media decoder: workers is {workers}; it must be at least 1", reason="BAD_LIMIT")
        self._workers = workers
        self._idle: asyncio.Queue[DecodeProcess | None] = asyncio.Queue()
        self._children: set[DecodeProcess] = set()
        self._reaping: set[asyncio.Task[int]] = set()
        self._open = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that live now."""
        return sorted(child.pid for child in self._children if child.alive)

    async def start(self) -> None:
        """Start all children. Raises Unavailable when they do not come up; nothing is left running then."""
        if self._open:
            return
        started = await asyncio.gather(*(DecodeProcess.start() for _ in range(self._workers)), return_exceptions=True)
        self._children = {child for child in started if isinstance(child, DecodeProcess)}
        failures = [failure for failure in started if isinstance(failure, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        if not all(child.confined for child in self._children):
            log.warning("this kernel has no seccomp filters: decoding children are limited in memory and time, but could open "
                        "files and sockets if a media file took one over")
        for child in self._children:
            self._idle.put_nowait(child)
        self._open = True

    async def close(self) -> None:
        """Kill the children, decoding or not, and wait until they are reaped."""
        self._open = False
        for child in list(self._children):
            self._discard(child)
        self._idle = asyncio.Queue()
        await asyncio.gather(*self._reaping)

    async def __aenter__(self) -> MediaDecoder:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def decode(
        self, media: Sequence[MediaRef], limits: MediaLimits, roots: Sequence[Path], *, factor: int = 28
    ) -> DecodedMedia:
        """Decode one prompt's media, in order, into one memfd. Frame sides come out as multiples of `factor`.

        Raises BadInput, Forbidden or DeadlineExceeded naming the path and the numbers; Unavailable when not started,
        closed, or when a replacement child does not start. Safe to cancel: the child is then replaced.
        """
        request = plan.request(media, limits, factor)
        paths = [path for entry in media for path in entry.paths]
        if not self._open:
            raise Unavailable("the media decoder is not running")
        files = await _open_files(paths, roots, limits.max_file_bytes)
        try:
            return await self._decode_open(request, files, paths, limits)
        finally:
            for fd in files:
                os.close(fd)

    async def _decode_open(
        self, request: dict[str, Any], files: list[int], paths: list[str], limits: MediaLimits
    ) -> DecodedMedia:
        idle = self._idle
        child = await idle.get()
        try:
            if not self._open:
                raise Unavailable("the media decoder was closed")
            if child is None or not child.alive:
                self._discard(child)
                child = None
                child = await self._replacement()
            outcome = await self._ask(child, request, files, paths, limits)
        except BaseException:
            self._discard(child)
            child = None
            raise
        finally:
            idle.put_nowait(child)
        if isinstance(outcome, BadInput):
            raise outcome
        return outcome

    async def _replacement(self) -> DecodeProcess:
        child = await DecodeProcess.start()
        if not self._open:
            await child.kill()
            raise Unavailable("the media decoder was closed")
        self._children.add(child)
        return child

    def _discard(self, child: DecodeProcess | None) -> None:
        if child is None or child not in self._children:
            return
        self._children.remove(child)
        task = child.kill()
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _ask(
        self, child: DecodeProcess, request: dict[str, Any], files: list[int], paths: list[str], limits: MediaLimits
    ) -> DecodedMedia | BadInput:
        """The slab, or what the child found wrong with the files. Whatever is raised has cost the child its place."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(limits.decode_timeout_s):
                reply, fds = await child.exchange(request, files)
        except TimeoutError as error:
            raise _late(paths, limits) from error
        except ChildDied as error:
            if not self._open:
                raise Unavailable("the media decoder was closed while decoding") from error
            raise await _death(child, paths, limits, time.monotonic() - begun) from error
        except ValueError as error:
            raise _distrusted(error) from error
        return _fault(reply, fds, paths, limits) if "error" in reply else _slab(reply, fds, request)


async def _open_files(paths: list[str], roots: Sequence[Path], max_file_bytes: int) -> list[int]:
    """Opened in a thread, because a network file system may block."""
    opening = asyncio.ensure_future(asyncio.to_thread(_open_all, paths, roots, max_file_bytes))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _open_all(paths: list[str], roots: Sequence[Path], max_file_bytes: int) -> list[int]:
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(open_media(path, roots, max_file_bytes=max_file_bytes))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _close_opened(opening: asyncio.Future[list[int]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for fd in opening.result():
            os.close(fd)


def _slab(reply: dict[str, Any], fds: list[int], request: dict[str, Any]) -> DecodedMedia:
    """Check what came out of a process that has read untrusted bytes."""
    try:
        if len(fds) != 1:
            raise ValueError(f"{len(fds)} fds")
        items = [MediaItem.from_json(item) for item in reply["items"]]
        size_bytes = os.fstat(fds[0]).st_size
        end = max(item.offset_bytes + item.size_bytes for item in items)
        if [item.kind for item in items] != [item["kind"] for item in request["items"]]:
            raise ValueError(f"kinds {[item.kind for item in items]}")
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SLAB_SEALS != SLAB_SEALS:
            raise ValueError("an unsealed memfd")
        if not all(min(item.shape) > 0 and item.shape[3] == 3 and item.offset_bytes >= 0 for item in items):
            raise ValueError(f"shapes {[item.shape for item in items]}")
        if end != size_bytes or size_bytes > request["max_slab_bytes"]:
            raise ValueError(f"{size_bytes} bytes, items up to {end}")
    except (ValueError, TypeError, KeyError, OSError) as error:
        for fd in fds:
            os.close(fd)
        raise _distrusted(error) from error
    return DecodedMedia(fds[0], size_bytes, items)


def _fault(reply: dict[str, Any], fds: list[int], paths: list[str], limits: MediaLimits) -> BadInput:
    for fd in fds:
        os.close(fd)
    if reply["error"] == "MEDIA_MEMORY":
        return _out_of_memory(paths, limits)
    try:
        path = paths[reply["file"]]
        return BadInput(f"media file {path} {reply['what']}", reason=reply["error"], path=path, **reply["numbers"])
    except (KeyError, IndexError, TypeError) as error:
        raise _distrusted(error) from error


def _distrusted(error: Exception) -> InternalError:
    return InternalError(f"a decoding child gave an answer that cannot be right: {error!r}", reason="MEDIA_BAD_REPLY")


def _late(paths: list[str], limits: MediaLimits) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"decoding {_named(paths)} took more than {limits.decode_timeout_s} s (decode_timeout_s)",
        reason="MEDIA_TIMEOUT",
        path=paths[0],
        timeout_s=limits.decode_timeout_s,
    )


def _out_of_memory(paths: list[str], limits: MediaLimits) -> BadInput:
    return BadInput(
        f"decoding {_named(paths)} needs more than {limits.child_memory_bytes} bytes of memory (child_memory_bytes)",
        reason="MEDIA_MEMORY",
        path=paths[0],
        limit_bytes=limits.child_memory_bytes,
    )


async def _death(child: DecodeProcess, paths: list[str], limits: MediaLimits, after_s: float) -> BadInput | DeadlineExceeded:
    code = await child.exit_code()
    if code == -signal.SIGXCPU:
        return _late(paths, limits)
    how = "hung up" if code is None else f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return BadInput(
        f"the process decoding {_named(paths)} {how} after {after_s:.1f} s; the file is broken, or it needs more than "
        f"{limits.child_memory_bytes} bytes of memory (child_memory_bytes)",
        reason="MEDIA_CRASHED",
        path=paths[0],
        exit_code=code,
        limit_bytes=limits.child_memory_bytes,
    )


def _named(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more file(s)"
