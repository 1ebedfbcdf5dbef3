"""How datasets write media: a path, a dict, raw bytes, a list of frames. Here each becomes a `MediaRef`."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.core.errors import BadInput
from rollplex.data.rows import MediaRef

MEDIA_OPTIONS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
IMAGE_OPTIONS = ("min_pixels", "max_pixels")

MAGIC = (
    (b"\x89PNG", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"\x1aE\xdf\xa3", ".mkv"),
)


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where a dataset's media are found, and where embedded bytes go."""

    root: Path
    """Put before relative paths."""
    spool_dir: Path | None = None

    def refs(self, kind: str, value: Any, column: str) -> list[MediaRef]:
        """A media column's whole value: one entry or a list of them; None and [] are no media. Raises BadInput."""
        if value is None:
            return []
        if kind == "video" and column == "video":
            entries = [value]
        else:
            entries = value if isinstance(value, list) else [value]
        return [self.ref(kind, entry, column) for entry in entries]

    def ref(self, kind: str, value: Any, column: str) -> MediaRef:
        """One image or video. Raises BadInput naming `column` and the value."""
        if isinstance(value, dict):
            return self._from_dict(kind, value, column)
        if kind == "video" and isinstance(value, list):
            if not value:
                raise BadInput(f"column {column!r} has a video of no frames", reason="MEDIA_NO_FRAMES", column=column)
            return MediaRef("video", frames=tuple(self.ref("image", frame, column).path for frame in value))
        return MediaRef(kind, path=self._file(value, column))

    def _from_dict(self, kind: str, value: dict[str, Any], column: str) -> MediaRef:
        given = {key: entry for key, entry in value.items() if entry is not None and key != "type"}
        options = MEDIA_OPTIONS if kind == "video" else IMAGE_OPTIONS
        places = ("bytes", kind, "path", "url")
        for key in given:
            if key not in options and key not in places:
                near = difflib.get_close_matches(key, (*options, *places), n=1, cutoff=0)[0]
                raise BadInput(
                    f"column {column!r} has a {kind} with the unknown key {key!r} = {_short(given[key])}; "
                    f"nearest known: {near!r}",
                    reason="BAD_MEDIA",
                    column=column,
                    key=key,
                    nearest=near,
                )
        place = next((given[key] for key in places if key in given), None)
        if place is None:
            raise BadInput(
                f"column {column!r} has a {kind} without any of {', '.join(places)}: {_short(value)}",
                reason="BAD_MEDIA",
                column=column,
            )
        base = self.ref(kind, place, column)
        return MediaRef(kind, base.path, base.frames, **{key: given[key] for key in options if key in given})

    def _file(self, value: Any, column: str) -> str:
        if isinstance(value, (bytes, bytearray)):
            return self._spool(bytes(value), column)
        if not isinstance(value, str) or not value.strip():
            raise BadInput(
                f"column {column!r} has {_short(value)} where a path, bytes or a dict is expected",
                reason="BAD_MEDIA",
                column=column,
            )
        if value.startswith("data:"):
            return self._spool(_data_uri(value, column), column)
        path = value.removeprefix("file://")
        if "://" in path:
            raise BadInput(
                f"column {column!r} has the address {_short(value)}; media must be files: download them first",
                reason="BAD_MEDIA",
                column=column,
            )
        return os.path.normpath(self.root / path)

    def _spool(self, data: bytes, column: str) -> str:
        """The path of a file with exactly these bytes, named by their hash, so that equal media are stored once."""
        if self.spool_dir is None:
            raise BadInput(
                f"column {column!r} has {len(data)} embedded bytes and there is no folder to write them to (spool_dir)",
                reason="NO_SPOOL",
                column=column,
            )
        suffix = next((suffix for magic, suffix in MAGIC if data.startswith(magic)), None)
        suffix = suffix or (".mp4" if data[4:8] == b"ftyp" else ".webp" if data[8:12] == b"WEBP" else ".bin")
        path = self.spool_dir / f"{hashlib.sha256(data).hexdigest()}{suffix}"
        if not path.exists():
            self.spool_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.spool_dir, prefix=".spool-", delete=False) as file:
                file.write(data)
            Path(file.name).rename(path)
        return str(path)


def _data_uri(value: str, column: str) -> bytes:
    head, _, body = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadInput(f"column {column!r} has a broken data URI {_short(value)}: {error}", reason="BAD_MEDIA") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
