"""Writes the demo's videos (H.264 in mp4) and its question files (the Video-R1 JSON list)."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np

from rollplex.demo.clips import BLOCK_ROWS, FPS, FRAME_PX, LETTERS, PAIRS, QUESTIONS, Clip, draw_clip, render

# One thread and no assembly: with x264's own, pictures this narrow now and then give other bytes for the same frames.
_X264 = {"crf": "16", "preset": "veryfast", "threads": "1", "x264-params": "asm=0"}


@dataclass(frozen=True)
class DemoFiles:
    """What `make_videos` wrote. `path` in the rows is relative to `directory`."""

    directory: Path
    train: Path
    heldout: Path
    train_rows: int
    heldout_rows: int
    video_bytes: int


def make_videos(directory: Path, *, seed: int, train_rows: int, heldout_rows: int, blank: bool = False) -> DemoFiles:
    """Render, encode and label the demo's clips under `directory`; the same arguments give the same files.

    Rows come in blocks of BLOCK_ROWS: each block holds every (question kind, answer) pair once, in random order. Read
    in order, with a multiple of BLOCK_ROWS prompts per iteration, a policy that ignores the video scores exactly chance, in every
    iteration: what the controls measure is then not blurred by a lucky draw of questions.
    """
    for name, rows in (("train_rows", train_rows), ("heldout_rows", heldout_rows)):
        if rows <= 0 or rows % BLOCK_ROWS:
            raise ValueError(f"{name} is {rows}; it must be a positive multiple of {BLOCK_ROWS} to keep answers balanced")
    videos = directory / "videos"
    videos.mkdir(parents=True, exist_ok=True)
    streams = np.random.SeedSequence(seed).spawn(2)
    size_bytes, paths = 0, {}
    for split, rows, stream in (("train", train_rows, streams[0]), ("heldout", heldout_rows, streams[1])):
        records = []
        for index, (kind, answer, clip) in enumerate(draw_rows(rows, np.random.default_rng(stream))):
            video = videos / f"{split}-{index:04d}.mp4"
            with video.open("wb") as file:
                encode(render(clip, blank=blank), file)
            size_bytes += video.stat().st_size
            records.append(_record(index, kind, answer, f"./videos/{video.name}"))
        paths[split] = directory / f"{split}.json"
        paths[split].write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return DemoFiles(directory, paths["train"], paths["heldout"], train_rows, heldout_rows, size_bytes)


def draw_rows(rows: int, rng: np.random.Generator) -> list[tuple[str, int, Clip]]:
    """(question kind, answer index, clip) for `rows` rows, balanced block by block."""
    order = np.concatenate([rng.permutation(BLOCK_ROWS) for _ in range(-(-rows // BLOCK_ROWS))])[:rows]
    return [(*PAIRS[pair], draw_clip(*PAIRS[pair], rng)) for pair in order]


def encode(frames: np.ndarray, file: BinaryIO) -> None:
    """Write uint8 RGB frames [T, H, W, 3] as an H.264 mp4 of FPS frames a second."""
    with av.open(file, mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=_X264)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def decode(file: BinaryIO | Path) -> np.ndarray:
    """All frames of a video, uint8 RGB [T, H, W, 3]."""
    with av.open(str(file) if isinstance(file, Path) else file) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def encoded_clip(clip: Clip, *, blank: bool = False) -> np.ndarray:
    """The clip as a reader of its file sees it: rendered, encoded and decoded in memory, uint8 [T, H, W, 3]."""
    buffer = io.BytesIO()
    encode(render(clip, blank=blank), buffer)
    buffer.seek(0)
    return decode(buffer)


def _record(index: int, kind: str, answer: int, path: str) -> dict[str, object]:
    """One Video-R1 row."""
    question = QUESTIONS[kind]
    return {
        "problem_id": index,
        "problem": question.text,
        "data_type": "video",
        "problem_type": "multiple choice" if question.options else "numerical",
        "options": [f"{letter}. {option}" for letter, option in zip(LETTERS, question.options)],
        "solution": f"<answer>{question.answers[answer]}</answer>",
        "path": path,
        "data_source": f"rollplex-demo/{FRAME_PX}px/{kind}",
    }
