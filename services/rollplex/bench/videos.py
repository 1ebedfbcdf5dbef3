"""Video files whose frames give a wanted number of tokens, and texts that fill prompts up to it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np

from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor, TokenizedPrompt

FPS = 2
CELL = 14
"""Pixels of a side of a cell of the background."""
LONGEST_CLIP = 16
"""Frames; Video-R1 keeps as many at most."""
LEAST_FRAME = 4
"""Tokens of a frame pair; the processor would enlarge smaller ones."""
LEAST_TEXT = 24
"""Tokens of a prompt that are left to its text."""
NUMBER = "Video 0000. "
"""Every prompt's text begins with its number, so that no two prompts are alike."""
SENTENCE = "Describe what moves in the video, where it goes and how fast, step by step, and answer at the end. "


@dataclass(frozen=True, slots=True)
class Clips:
    """One size for all videos of a benchmark."""

    frames: int
    height: int
    width: int
    """Pixels; multiples of patch times merge size, so that nothing is resized."""

    @property
    def media_options(self) -> dict[str, Any]:
        """[coordinator.media]: every frame of a clip, as it is."""
        pixels = self.height * self.width
        return {"fps": float(FPS), "min_frames": self.frames, "max_frames": self.frames, "video_min_pixels": pixels,
                "video_max_pixels": pixels, "total_pixels": pixels * self.frames}


def choose_clips(media_tokens: int, factor: int) -> Clips:
    """At most `media_tokens` tokens: the longest clip whose frames have 16 tokens or more, no flatter than 1:2.

    Raises ValueError when not even two frames of four tokens fit.
    """
    if media_tokens < LEAST_FRAME:
        raise ValueError(f"{media_tokens} tokens are left for the video, {LEAST_FRAME} are needed: ask for a longer prompt")
    pairs = max(1, min(LONGEST_CLIP // 2, media_tokens // 16))
    share = media_tokens // pairs
    square = math.isqrt(share)
    rows = max((rows for rows in range(1, square + 1) if rows == square or 2 * rows >= share // rows),
               key=lambda rows: (share // rows * rows, -rows))
    return Clips(2 * pairs, rows * factor, share // rows * factor)


def fill_text(count: Callable[[str], int], wanted: int) -> str:
    """The longest text of repeated sentences with which a prompt has at most `wanted` tokens, at least one character."""
    low, high = 1, 2
    while count(_text(high)) <= wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(_text(middle)) <= wanted else (low, middle)
    return _text(low)


def _text(length: int) -> str:
    return (NUMBER + SENTENCE * (length // len(SENTENCE) + 1))[:length]


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]


def tokenize(processor: PromptProcessor, clips: Clips, text: str) -> TokenizedPrompt:
    """As the coordinator will: the processor's own arithmetic on the frames' shape, no pixel read."""
    times = tuple(index / FPS for index in range(clips.frames))
    item = MediaItem("video", 0, (clips.frames, clips.height, clips.width, 3), float(FPS), times, clips.frames,
                     clips.frames / FPS, "")
    return processor.tokenize(messages(text), [item])


def build_workload(directory: Path, checkpoint: Path, *, prompt_tokens: int, groups: int, seed: int) -> dict[str, Any]:
    """Writes videos and workload.json: what prompts are made of and their true size. Raises ValueError, BadInput."""
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2 * prompt_tokens + 4096)
    smallest = Clips(2, processor.factor * 2, processor.factor * 2)
    fixed = len(tokenize(processor, smallest, "x").token_ids) - 4
    clips = choose_clips(prompt_tokens - fixed - LEAST_TEXT, processor.factor)
    text = fill_text(lambda candidate: len(tokenize(processor, clips, candidate).token_ids), prompt_tokens)
    prompt = tokenize(processor, clips, text)
    videos = directory / "videos"
    videos.mkdir(parents=True, exist_ok=True)
    texts = [text.replace("0000", f"{index:04d}", 1) for index in range(groups)]
    paths = [videos / f"{index:04d}.mp4" for index in range(groups)]
    # Threads: the encoder works without the interpreter's lock.
    with ThreadPoolExecutor(min(groups, len(os.sched_getaffinity(0)), 16)) as pool:
        sizes = list(pool.map(write_video, paths, [clips] * groups, range(seed, seed + groups)))
    grid = [int(extent) for extent in prompt.video_grid_thw[0]]
    workload = {
        "videos": [str(path.absolute()) for path in paths], "video_bytes": sum(sizes), "texts": texts, "clips": asdict(clips),
        "media": clips.media_options, "prompt_tokens": len(prompt.token_ids), "grid_thw": grid,
        "media_tokens": int((prompt.token_ids == processor.video_token_id).sum())}
    (directory / "workload.json").write_text(json.dumps(workload, indent=1) + "\n")
    return workload


def write_video(path: Path, clips: Clips, seed: int) -> int:
    """H.264: three coloured patches that drift over a field of noise. Returns its bytes."""
    rng = np.random.default_rng(seed)
    height, width = clips.height // 4, clips.width // 4
    ground = rng.integers(0, 96, (-(-clips.height // CELL), -(-clips.width // CELL), 3), dtype=np.uint8)
    starts = rng.integers(0, (clips.height - height, clips.width - width), (3, 2))
    steps = rng.integers(-24, 25, (3, 2))
    with av.open(str(path), mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "23", "preset": "ultrafast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = clips.width, clips.height, "yuv420p"
        for index in range(clips.frames):
            frame = np.roll(ground, index, axis=1).repeat(CELL, 0).repeat(CELL, 1)[: clips.height, : clips.width].copy()
            for channel, (top, left) in enumerate((starts + index * steps) % (clips.height - height, clips.width - width)):
                frame[top : top + height, left : left + width, channel] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path.stat().st_size
