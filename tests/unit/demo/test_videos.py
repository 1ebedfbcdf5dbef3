"""The demo's clips, read back from their encoded files, show what their labels say."""

import json
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest

from rollplex.demo.clips import COLOURS, COUNTS, DIRECTIONS, FPS, FRAME_PX, FRAMES, LETTERS, ORDERS, QUESTIONS
from rollplex.demo.videos import decode, make_videos


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory):
    return make_videos(tmp_path_factory.mktemp("demo"), seed=3, train_rows=64, heldout_rows=32)


def rows_of(file: Path) -> list[dict]:
    return json.loads(file.read_text(encoding="utf-8"))


def answer_index(row: dict) -> int:
    answer = row["solution"].removeprefix("<answer>").removesuffix("</answer>")
    return LETTERS.index(answer) if row["options"] else COUNTS.index(int(answer))


def shapes(frame: np.ndarray) -> np.ndarray:
    """Mask [H, W] of the pixels that are much brighter than the background in some channel."""
    return frame.max(axis=-1) > 140


def colour(frame: np.ndarray) -> str:
    mean = frame[shapes(frame)].mean(axis=0)
    return min(COLOURS, key=lambda name: np.abs(mean - COLOURS[name]).sum())


def direction(frames: np.ndarray) -> str:
    first, last = (np.argwhere(shapes(frame)).mean(axis=0)[::-1] for frame in (frames[0], frames[-1]))
    return max(DIRECTIONS, key=lambda name: float(np.dot(last - first, DIRECTIONS[name])))


def count(frame: np.ndarray) -> int:
    """Connected regions of at least twenty pixels, by flood fill."""
    left, found = {tuple(pixel) for pixel in np.argwhere(shapes(frame))}, 0
    while left:
        region, edge = 0, [left.pop()]
        while edge:
            y, x = edge.pop()
            region += 1
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
        found += region >= 20
    return found


def test_every_video_shows_its_label(demo):
    for row in rows_of(demo.train) + rows_of(demo.heldout):
        frames = decode(demo.directory / row["path"])
        assert frames.shape == (FRAMES, FRAME_PX, FRAME_PX, 3)
        kind, right = row["data_source"].rsplit("/", 1)[1], answer_index(row)
        seen = {
            "direction": lambda f: list(DIRECTIONS).index(direction(f)),
            "colour": lambda f: list(COLOURS).index(colour(f[0])),
            "count": lambda f: COUNTS.index(count(f[0])),
            "order": lambda f: ORDERS.index((colour(f[0]), colour(f[-1]))),
        }[kind](frames)
        assert seen == right, (row["path"], kind)


def test_files_are_h264_at_the_stated_rate(demo):
    with av.open(str(demo.directory / rows_of(demo.train)[0]["path"])) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == ("h264", FPS, FRAMES)


def test_every_block_of_16_holds_every_answer_once(demo):
    for file in (demo.train, demo.heldout):
        rows = rows_of(file)
        for start in range(0, len(rows), 16):
            pairs = Counter((row["data_source"], row["solution"]) for row in rows[start : start + 16])
            assert len(pairs) == 16


def test_rows_follow_the_video_r1_schema(demo):
    rows = rows_of(demo.train)
    assert [row["problem_id"] for row in rows] == list(range(64))
    assert {row["problem"] for row in rows} == {question.text for question in QUESTIONS.values()}
    for row in rows:
        assert set(row) == {
            "problem_id", "problem", "data_type", "problem_type", "options", "solution", "path", "data_source",
        }  # fmt: skip
        assert row["data_type"] == "video" and row["path"].startswith("./")
        assert row["problem_type"] == ("multiple choice" if row["options"] else "numerical")


def test_same_seed_same_files_and_other_seed_other_files(demo, tmp_path):
    again = make_videos(tmp_path / "again", seed=3, train_rows=16, heldout_rows=16)
    other = make_videos(tmp_path / "other", seed=4, train_rows=16, heldout_rows=16)
    assert again.heldout.read_bytes() == make_videos(tmp_path / "b", seed=3, train_rows=16, heldout_rows=16).heldout.read_bytes()
    assert again.heldout.read_bytes() != other.heldout.read_bytes()
    for name in ("train-0000.mp4", "heldout-0015.mp4"):
        same = (tmp_path / "b" / "videos" / name).read_bytes()
        assert (again.directory / "videos" / name).read_bytes() == same
        assert (other.directory / "videos" / name).read_bytes() != same


def test_heldout_clips_are_not_training_clips(demo):
    clips = {(demo.directory / row["path"]).read_bytes() for row in rows_of(demo.train)}
    assert not clips & {(demo.directory / row["path"]).read_bytes() for row in rows_of(demo.heldout)}


def test_blank_videos_keep_the_labels_and_show_nothing(tmp_path, demo):
    blank = make_videos(tmp_path, seed=3, train_rows=64, heldout_rows=32, blank=True)
    assert blank.train.read_bytes() == demo.train.read_bytes()
    for row in rows_of(blank.train)[:16]:
        assert not shapes(decode(blank.directory / row["path"])).any()


def test_unbalanced_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train_rows is 20; it must be a positive multiple of 16"):
        make_videos(tmp_path, seed=0, train_rows=20, heldout_rows=16)
