"""Every dataset format in, and every way a row can be wrong."""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollplex.core.errors import BadInput, Forbidden
from rollplex.data.datasets import read_dataset, split_valid
from rollplex.data.row_formats import QUESTION_TEMPLATE, TYPE_TEMPLATES
from rollplex.data.rows import PROBLEM_TYPES, MediaRef, PromptRow, check_row, placeholder_kinds

VIDEO_R1 = {
    "problem_id": 7,
    "problem": "Which way?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. left", "B. right"],
    "solution": "<answer>A</answer>",
    "path": "./videos/clip.mp4",
    "data_source": "moving",
}
VERL = {
    "data_source": "geo3k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>How <image> many?"}],
    "images": [{"image": "a.png", "max_pixels": 50176}, "sub/b.png"],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 3},
}
TRL = {
    "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
    "image": "a.png",
    "solution": "a cat",
    "difficulty": 0.5,
}


@pytest.fixture
def read(tmp_path):
    def read(*rows, name="rows.jsonl", **options):
        path = tmp_path / name
        text = json.dumps(list(rows)) if name.endswith(".json") else "".join(f"{json.dumps(row)}\n" for row in rows)
        path.write_text(text)
        return read_dataset(path, **options)

    return read


def texts(row):
    return [part.get("text") for message in row.messages for part in message["content"]]


def test_video_r1_question_is_built_as_video_r1_builds_it(read, tmp_path):
    (row,) = read(VIDEO_R1, name="rows.json")
    question = "Which way?Options:\nA. left\nB. right\n"
    instruction = TYPE_TEMPLATES["multiple choice"]
    assert row.messages == [
        {
            "role": "user",
            "content": [
                {"type": "video"},
                {"type": "text", "text": QUESTION_TEMPLATE.replace("{Question}", question) + instruction},
            ],
        }
    ]
    assert row.media == (MediaRef("video", str(tmp_path / "videos/clip.mp4")),)
    assert (row.ground_truth, row.problem_type, row.data_source) == (
        "<answer>A</answer>",
        "multiple choice",
        "moving",
    )
    assert row.columns["problem_id"] == 7 and row.columns["options"] == ["A. left", "B. right"]


def test_video_r1_other_types_and_templates(read, tmp_path):
    rows = [
        {**VIDEO_R1, "problem_type": kind, "options": [], "data_type": "image", "path": "/abs/x.png"}
        for kind in PROBLEM_TYPES[1:]
    ]
    built = read(*rows, media_root=tmp_path / "elsewhere")
    assert [row.index for row in built] == [0, 1, 2, 3]
    for row in built:
        assert "Options:" not in texts(row)[1] and texts(row)[1].endswith(TYPE_TEMPLATES[row.problem_type])
        assert row.media[0] == MediaRef("image", "/abs/x.png")
    (own,) = read(VIDEO_R1, question_template="Q {Question}!", type_templates={"multiple choice": "?"})
    assert texts(own)[1] == "Q Which way?Options:\nA. left\nB. right\n!?"
    with pytest.raises(BadInput, match="no {Question}"):
        read(VIDEO_R1, question_template="Q")


def test_every_problem_type_has_a_template():
    assert set(TYPE_TEMPLATES) == set(PROBLEM_TYPES)
    assert all(tag in QUESTION_TEMPLATE for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def test_verl_rows(read, tmp_path):
    (row,) = read(VERL)
    assert [part["type"] for part in row.messages[1]["content"]] == ["image", "text", "image", "text"]
    assert row.media == (
        MediaRef("image", str(tmp_path / "a.png"), max_pixels=50176),
        MediaRef("image", str(tmp_path / "sub/b.png")),
    )
    assert (row.ground_truth, row.data_source) == ("42", "geo3k")
    assert row.columns["extra_info"] == {"split": "train", "index": 3} and "images" not in row.columns


def test_verl_videos(read, tmp_path):
    options = {"fps": 1, "max_frames": 8, "min_pixels": 784, "max_pixels": 7840, "total_pixels": 78400}
    videos = ["a.mp4", ["f0.png", "f1.png"], {"video": "file:///b.mp4", **options}, {"video": ["f0.png"], "fps": 2}]
    prompt = [{"role": "user", "content": "<video>" * 4 + "what?"}]
    (row,) = read({**VERL, "images": [], "videos": videos, "prompt": prompt})
    assert row.media == (
        MediaRef("video", str(tmp_path / "a.mp4")),
        MediaRef("video", frames=(str(tmp_path / "f0.png"), str(tmp_path / "f1.png"))),
        MediaRef("video", "/b.mp4", **options),
        MediaRef("video", frames=(str(tmp_path / "f0.png"),), fps=2),
    )


def test_media_come_in_placeholder_order(read):
    prompt = [{"role": "user", "content": "<video> then <image> then <video>"}]
    (row,) = read({**VERL, "prompt": prompt, "images": ["i.png"], "videos": ["1.mp4", "2.mp4"]})
    assert [ref.path.rsplit("/", 1)[1] for ref in row.media] == ["1.mp4", "i.png", "2.mp4"]
    assert placeholder_kinds(row.messages) == ["video", "image", "video"]


def test_parquet_with_embedded_images(tmp_path, image):
    data = image().read_bytes()
    rows = [
        {**VERL, "images": [{"bytes": data, "path": None}, {"bytes": data, "path": "a.png"}]},
        {**VERL, "images": [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": "b.png"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read_dataset(tmp_path / "rows.parquet", spool_dir=tmp_path / "spool")
    spooled = tmp_path / "spool" / f"{hashlib.sha256(data).hexdigest()}.png"
    assert [ref.path for ref in first.media] == [str(spooled)] * 2 and spooled.read_bytes() == data
    assert [ref.path for ref in second.media] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert list((tmp_path / "spool").iterdir()) == [spooled]
    with pytest.raises(BadInput, match=rf"row 0: column 'images' has {len(data)} embedded bytes.*spool_dir"):
        read_dataset(tmp_path / "rows.parquet")


def test_data_uris_are_spooled(read, tmp_path, image):
    data = image("x.jpg").read_bytes()
    uri = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    (row,) = read({**TRL, "image": uri}, spool_dir=tmp_path / "spool")
    assert row.media[0].path == str(tmp_path / "spool" / f"{hashlib.sha256(data).hexdigest()}.jpg")
    with pytest.raises(BadInput, match="broken data URI"):
        read({**TRL, "image": "data:image/jpeg;base64,%%"}, spool_dir=tmp_path / "spool")


def test_conversational_rows(read, tmp_path):
    untyped = {"messages": [{"role": "user", "content": "Look."}], "images": ["a.png", "b.png"], "answer": 3}
    inline = {
        "prompt": [{"role": "user", "content": [{"type": "video", "video": "v.mp4", "fps": 1}, "And now?"]}],
        "ground_truth": "x",
    }
    plain = {"problem": "1 + 1 = ?", "answer": "2"}
    roll = {"problem": "Which?", "video": "v.mp4", "solution": "<answer>A</answer>", "problem_type": "multiple choice"}
    rows = read(TRL, untyped, inline, plain, roll)
    assert rows[0].media == (MediaRef("image", str(tmp_path / "a.png")),)
    assert rows[0].columns == {"solution": "a cat", "difficulty": 0.5} and rows[0].ground_truth == "a cat"
    assert [part["type"] for part in rows[1].messages[0]["content"]] == ["image", "image", "text"]
    assert rows[1].ground_truth == "3"
    assert rows[2].media == (MediaRef("video", str(tmp_path / "v.mp4"), fps=1),)
    assert rows[3].messages == [{"role": "user", "content": [{"type": "text", "text": "1 + 1 = ?"}]}]
    assert rows[4].problem_type == "multiple choice" and placeholder_kinds(rows[4].messages) == ["video"]


def test_formats_may_mix_and_may_be_forced(read):
    assert [row.ground_truth for row in read(VIDEO_R1, VERL, TRL)] == ["<answer>A</answer>", "42", "a cat"]
    (row,) = read({**VIDEO_R1, "images": []}, format="conversational")
    assert texts(row) == ["Which way?"]
    with pytest.raises(BadInput, match="a video-r1 row needs the column problem"):
        read(VERL, format="video-r1")
    with pytest.raises(BadInput, match="'parquet' is none of"):
        read(VERL, format="parquet")


@pytest.mark.parametrize(
    ("row", "message", "reason"),
    [
        ({**VIDEO_R1, "problem_type": "multiple choise"}, "nearest known: 'multiple choice'", "UNKNOWN_PROBLEM_TYPE"),
        ({**TRL, "problem_type": "ocr"}, "'ocr'; nearest known: 'OCR'", "UNKNOWN_PROBLEM_TYPE"),
        ({**VIDEO_R1, "problem_type": None}, "column 'problem_type' is None", "BAD_COLUMN"),
        ({**VIDEO_R1, "solution": ""}, "ground truth is missing: column solution", "NO_GROUND_TRUTH"),
        ({**VERL, "reward_model": {"style": "rule"}}, "column reward_model.ground_truth", "NO_GROUND_TRUTH"),
        ({**TRL, "solution": None}, "column solution or answer or ground_truth", "NO_GROUND_TRUTH"),
        ({**VIDEO_R1, "problem": " "}, "column 'problem' is empty", "EMPTY_PROMPT"),
        ({**VIDEO_R1, "options": []}, "column 'options' is empty", "BAD_COLUMN"),
        ({**VIDEO_R1, "data_type": "audio"}, "'audio', neither", "BAD_COLUMN"),
        ({**VERL, "images": ["a.png"]}, "2 image placeholder(s) but the row has 1 image(s)", "PLACEHOLDER_COUNT"),
        ({**VERL, "videos": ["a.mp4"]}, "0 video placeholder(s) but the row has 1 video(s)", "PLACEHOLDER_COUNT"),
        ({**VERL, "images": None}, "2 image placeholder(s) but the row has 0 image(s)", "PLACEHOLDER_COUNT"),
        ({**VERL, "images": [{"imag": "a"}, "b"]}, "unknown key 'imag' = 'a'; nearest known: 'image'", "BAD_MEDIA"),
        ({**VERL, "images": [3, "b"]}, "column 'images' has 3 where a path", "BAD_MEDIA"),
        ({**VERL, "images": [{"max_pixels": 3}, "b"]}, "without any of bytes, image, path", "BAD_MEDIA"),
        ({**VERL, "images": ["https://x/a.png", "b"]}, "the address 'https://x/a.png'", "BAD_MEDIA"),
        ({**VERL, "videos": [[]]}, "a video of no frames", "MEDIA_NO_FRAMES"),
        ({**VERL, "audios": ["a.wav"]}, "audio is not supported", "BAD_COLUMN"),
        ({**TRL, "prompt": []}, "no messages", "EMPTY_PROMPT"),
        ({"prompt": "  ", "answer": "1"}, "the prompt is empty", "EMPTY_PROMPT"),
        ({**TRL, "prompt": [{"role": "system", "content": "x"}], "image": None}, "no user message", "NO_USER_MESSAGE"),
        ({**TRL, "prompt": [{"role": "human", "content": "x"}]}, "role 'human'", "BAD_ROLE"),
        ({**TRL, "prompt": [{"content": "x"}]}, "message 0 has no role", "BAD_COLUMN"),
        ({**TRL, "prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "no text, image or video", "BAD_PART"),
        ({**TRL, "prompt": {"a": 1}}, "column 'prompt' is a dict", "BAD_COLUMN"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "answer": "1"},
            "ends with an assistant message",
            "ENDS_WITH_ANSWER",
        ),
        ({"text": "x", "label": 1}, "no known format has the columns 'text', 'label'", "UNKNOWN_FORMAT"),
        (["x"], "it is a list, not an object", "BAD_ROW"),
    ],
)
def test_bad_rows_are_named_by_number(read, row, message, reason):
    with pytest.raises(BadInput) as caught:
        read(VIDEO_R1, row)
    assert "row 1: " in str(caught.value) and message in str(caught.value)
    assert caught.value.reason == reason and caught.value.metadata["row"] == "1"


def test_bad_rows_can_be_listed_instead(read):
    refused = []
    rows = read(VIDEO_R1, {"x": 1}, TRL, {**TRL, "solution": None}, refused=refused)
    assert [row.index for row in rows] == [0, 2] and [index for index, _ in refused] == [1, 3]
    assert "ground truth" in refused[1][1]


def test_ground_truth_and_types_can_be_left_open(read):
    (row,) = read({**TRL, "solution": None, "problem_type": "riddle"}, require_ground_truth=False, problem_types=None)
    assert row.ground_truth is None and row.problem_type == "riddle"


def test_parquet_values_become_json(tmp_path):
    plain = {**VERL, "images": ["a.png", "b.png"]}
    row = {**plain, "when": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.5"), "parts": [[1], [2]]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (read_row,) = read_dataset(tmp_path / "rows.parquet")
    assert json.loads(json.dumps(read_row.columns))["when"] == "2026-01-02" and read_row.columns["price"] == 1.5
    pq.write_table(pa.Table.from_pylist([{**plain, "blob": b"x"}]), tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match="column 'blob' holds a bytes"):
        read_dataset(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b", "none of .json"),
        ("rows.json", b"[{]", "line 1, column 3: no JSON"),
        ("rows.jsonl", b'{"a": 1}\n{"b"\n', "line 2, column"),
        ("rows.jsonl", b"\xff\xfe", "not UTF-8"),
        ("rows.parquet", b"PAR1 no", "no parquet"),
        ("rows.json", b"[]", "has no rows"),
        ("rows.jsonl", b"\n", "has no rows"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_dataset(tmp_path / name, refused=[])


def test_missing_file(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        read_dataset(tmp_path / "none.json")


def test_split_valid_lists_what_it_refuses():
    def check(row):
        if row.index == 1:
            raise BadInput("the prompt has 9 tokens, the limit is 8")
        if row.index == 2:
            raise Forbidden("outside")
        if row.index == 3:
            raise KeyError("a bug is not a bad row")

    rows = [PromptRow(index, []) for index in range(3)]
    valid, refused = split_valid(rows, check)
    assert valid == rows[:1] and refused == [(1, "the prompt has 9 tokens, the limit is 8"), (2, "outside")]
    with pytest.raises(KeyError):
        split_valid([PromptRow(3, [])], check)


def test_check_row_wants_paths_and_order():
    content = [{"type": "image"}, {"type": "video"}]
    media = (MediaRef("video", "a"), MediaRef("image", "b"))
    with pytest.raises(BadInput, match="in order"):
        check_row(PromptRow(0, [{"role": "user", "content": content}], media))
    with pytest.raises(BadInput, match=r"media 0 \(video\) has an empty path"):
        check_row(PromptRow(0, [{"role": "user", "content": content[1:]}], (MediaRef("video"),)))


@pytest.mark.parametrize(("text", "words"), [
    ("[" * 100_000, "no JSON that can be read"), ('{"prompt": ' + "9" * 5000 + "}", "no JSON that can be read"),
    ('{"prompt": "q", "answer": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
    ('{"messages": [{"role": "user", "content": 1000}]}', "content"),
    ('{"prompt": "q", "problem_type": ["OCR"], "answer": "x"}', "not a text")])
def test_json_that_only_an_enemy_writes(tmp_path, text, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_dataset(path)
