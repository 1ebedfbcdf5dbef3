"""What a demo clip shows, what is asked about it, and its pixels. Pure functions of a seed; no files, no torch.

A clip is FRAMES frames of FRAME_PX x FRAME_PX pixels: one to four squares or discs of one colour move together in one of four
directions over a noisy dark background, and the colour may change half-way. Four kinds of question are asked about clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FRAME_PX = 56  # a multiple of patch 14 x merge 2, so that the processor has nothing to resize
FRAMES = 4
FPS = 2  # Video-R1 samples 2 frames a second, at least 4: exactly these frames

COLOURS = {"red": (225, 45, 45), "green": (45, 200, 70), "blue": (60, 90, 235), "yellow": (235, 215, 50)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
COUNTS = (1, 2, 3, 4)
ORDERS = (("red", "blue"), ("blue", "red"), ("green", "yellow"), ("yellow", "green"))
LETTERS = "ABCD"

_SPEED_PX = 5.0  # a frame
_RADIUS_PX = 6.5
_CELL_PX = 19.0  # distance between shapes
_BACKGROUND, _NOISE = 24, 14


@dataclass(frozen=True)
class Clip:
    """Everything a clip shows. `colours` holds the colour of the first and of the second half."""

    colours: tuple[str, str]
    direction: str
    count: int
    disc: bool
    seed: int


@dataclass(frozen=True)
class Question:
    """One kind of question: its text, its options in their fixed order (none: the answer is a number)."""

    text: str
    options: tuple[str, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """What may stand between <answer> and </answer>: the option letters, or the numbers."""
        return tuple(LETTERS[: len(self.options)]) if self.options else tuple(str(n) for n in COUNTS)


QUESTIONS = {
    "direction": Question("Which direction do the shapes move?", tuple(DIRECTIONS)),
    "colour": Question("Which colour do the shapes have?", tuple(COLOURS)),
    "count": Question("How many shapes are there?", ()),
    "order": Question("In what order do the colours appear?", tuple(f"{a} then {b}" for a, b in ORDERS)),
}
# Every question kind has four answers: 16 pairs. A block of BLOCK_ROWS rows holds each pair once.
PAIRS = tuple((kind, answer) for kind in QUESTIONS for answer in range(4))
BLOCK_ROWS = len(PAIRS)


def draw_clip(kind: str, answer: int, rng: np.random.Generator) -> Clip:
    """A random clip to which the `answer`-th option of `kind` is right; what is not asked about is uniform.

    Only clips asked about their order change colour, so that "which colour" has one answer.
    """
    colour = list(COLOURS)[rng.integers(4)]
    direction = list(DIRECTIONS)[rng.integers(4)]
    count = int(rng.integers(1, 5))
    colours = (colour, colour)
    if kind == "direction":
        direction = list(DIRECTIONS)[answer]
    elif kind == "colour":
        colours = (list(COLOURS)[answer],) * 2
    elif kind == "count":
        count = COUNTS[answer]
    elif kind == "order":
        colours = ORDERS[answer]
    else:
        raise ValueError(f"unknown question kind {kind!r}; known: {', '.join(QUESTIONS)}")
    return Clip(colours, direction, count, bool(rng.integers(2)), int(rng.integers(2**31)))


def render(clip: Clip, *, blank: bool = False) -> np.ndarray:
    """The clip's frames, uint8 [FRAMES, FRAME_PX, FRAME_PX, 3] (RGB). `blank` leaves the noisy background alone."""
    rng = np.random.default_rng(clip.seed)
    frames = _BACKGROUND + rng.normal(0, _NOISE, (FRAMES, FRAME_PX, FRAME_PX, 3))
    if not blank:
        y, x = np.mgrid[0:FRAME_PX, 0:FRAME_PX] + 0.5
        for frame, centres in enumerate(_centres(clip, rng)):
            colour = np.array(COLOURS[clip.colours[frame * 2 // FRAMES]], dtype=float)
            for cx, cy in centres:
                dx, dy = np.abs(x - cx), np.abs(y - cy)
                distance = np.hypot(dx, dy) if clip.disc else np.maximum(dx, dy) * 1.1
                frames[frame][distance < _RADIUS_PX] = colour + rng.normal(0, _NOISE / 2, 3)
    return frames.clip(0, 255).astype(np.uint8)


def _centres(clip: Clip, rng: np.random.Generator) -> np.ndarray:
    """Centres of the shapes in pixels, [FRAMES, count, 2] as (x, y); the middle of the walk is the middle of the picture."""
    cells = np.array([(x, y) for y in (-0.5, 0.5) for x in (-0.5, 0.5)]) * _CELL_PX
    formation = cells[rng.permutation(4)[: clip.count]] + rng.uniform(-2, 2, 2)
    walk = (np.arange(FRAMES) - (FRAMES - 1) / 2) * _SPEED_PX
    steps = walk[:, None] * np.array(DIRECTIONS[clip.direction], dtype=float)
    return FRAME_PX / 2 + formation[None] + steps[:, None]
