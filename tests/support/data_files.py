"""One small data file of every format that `rollplex train` reads, over the demo's videos and images made here."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

LETTERS = "ABCD"


def png(shade: int, size: tuple[int, int] = (56, 84)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 30, 200 - shade)).save(buffer, "PNG")
    return buffer.getvalue()


def write_json(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(list(rows)))
    return path


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


class DataFiles:
    """Files in `folder`, which is not where the videos are."""

    def __init__(self, folder: Path, videos: Path) -> None:
        self.folder, self.videos = folder, sorted((videos / "videos").glob("train-*.mp4"))
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(4):
            (folder / f"still-{index}.png").write_bytes(png(40 * index))

    def video_r1_row(self, index: int = 0, **changes: Any) -> dict[str, Any]:
        return {"problem_id": index, "problem": f"Which way, {index}?", "data_type": "video", "problem_type": "multiple choice",
                "options": ["A. left", "B. right"], "solution": f"<answer>{LETTERS[index % 2]}</answer>",
                "path": str(self.videos[index]), "data_source": "cli", **changes}

    def video_r1_absolute(self) -> Path:
        return write_json(self.folder / "absolute.json", map(self.video_r1_row, range(4)))

    def video_r1_relative(self) -> Path:
        """Relative to the file's own folder, with a numerical question and an image among the rows."""
        def relative(index: int) -> str:
            return os.path.relpath(self.videos[index], self.folder)

        return write_json(self.folder / "relative.json", [
            self.video_r1_row(0, path=relative(0)), self.video_r1_row(1, path=f"./{relative(1)}"),
            self.video_r1_row(2, path=relative(2), problem_type="numerical", options=[], solution="<answer>3</answer>"),
            self.video_r1_row(3, path="still-0.png", data_type="image")])

    def _verl(self, index: int, content: str, **columns: Any) -> dict[str, Any]:
        return {"data_source": "cli",
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
                "reward_model": {"style": "rule", "ground_truth": LETTERS[index % 2]}, "ability": "vision",
                "extra_info": {"index": index, "split": "train", "problem_type": "multiple choice"}, **columns}

    def verl_jsonl(self) -> Path:
        """Bytes as JSON holds them: data URIs; and a video by path."""
        uri = "data:image/png;base64," + base64.b64encode(png(90)).decode()
        return write_jsonl(self.folder / "verl.jsonl", [
            self._verl(0, "<image>Which colour?", images=[{"image": uri}]),
            self._verl(1, "<video>Which way?", videos=[{"video": str(self.videos[0]), "fps": 2.0, "max_frames": 4}]),
            self._verl(2, "<image>This, and then <video>that?", images=[uri], videos=[str(self.videos[1])]),
            self._verl(3, "What is two and two?")])

    def verl_parquet(self) -> Path:
        return write_parquet(self.folder / "verl.parquet", [
            self._verl(0, "<image>Which colour?", images=[{"bytes": png(10), "path": None}], videos=None),
            self._verl(1, "First <image>, second <image>: which is redder?", videos=None,
                       images=[{"bytes": png(20), "path": "a.png"}, {"bytes": png(200), "path": "b.png"}]),
            self._verl(2, "<video>Which way?", images=None, videos=[{"bytes": self.videos[2].read_bytes(), "path": None}]),
            self._verl(3, "<image>\n<video>Are they alike?", images=[{"bytes": png(60), "path": None}],
                       videos=[{"bytes": self.videos[3].read_bytes(), "path": None}])])

    def _trl(self, index: int, *parts: dict[str, Any], **columns: Any) -> dict[str, Any]:
        return {"prompt": [{"role": "system", "content": [{"type": "text", "text": "You see."}]},
                           {"role": "user", "content": [*parts, {"type": "text", "text": f"Which one, {index}?"}]}],
                "solution": f"<answer>{LETTERS[index % 2]}</answer>", "problem_type": "multiple choice", **columns}

    def trl_jsonl(self) -> Path:
        """Typed content, images by path; one row has its images column only, without placeholders."""
        image = {"type": "image"}
        return write_jsonl(self.folder / "trl.jsonl", [
            self._trl(0, image, images=["still-0.png"]), self._trl(1, image, image, images=["still-1.png", "still-2.png"]),
            self._trl(2, images=[str(self.folder / "still-3.png")]),
            {"prompt": "Which letter?", "image": "still-1.png", "solution": "A", "problem_type": "multiple choice"}])

    def trl_parquet(self) -> Path:
        """As `datasets` stores an Image column; parquet fills the parts' other keys with nulls."""
        image = {"type": "image"}
        return write_parquet(self.folder / "trl.parquet", [
            self._trl(index, *([image] * count), images=[{"bytes": png(30 * index + n), "path": None} for n in range(count)])
            for index, count in enumerate((1, 2, 1, 1))])

    def mixed(self) -> Path:
        """Text, image, video, both; three formats in one file."""
        return write_jsonl(self.folder / "mixed.jsonl", [
            {"prompt": [{"role": "user", "content": "What is one and one?"}], "solution": "2", "problem_type": "numerical"},
            self._trl(1, {"type": "image"}, images=["still-2.png"]), self.video_r1_row(2),
            self._verl(3, "<image><video>Alike?", images=["still-3.png"], videos=[str(self.videos[1])])])
