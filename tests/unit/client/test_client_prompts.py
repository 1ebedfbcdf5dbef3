"""Rows and prompts on their way to a PromptGroup."""

from __future__ import annotations

import json

import pytest

from rollplex.core.errors import BadInput
from rollplex.data.rows import MediaRef, PromptRow
from rollplex_client import Media, Prompt, prompt_from_row
from rollplex_client.prompts import to_group

MESSAGES = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Which?"}]}]


def test_a_row_keeps_everything_that_was_given_and_nothing_else():
    row = PromptRow(3, MESSAGES, (MediaRef("video", "/v.mp4", fps=2.0, max_frames=8, total_pixels=10**10),), "A",
                    "multiple choice", None, {"level": 3})
    group = to_group(prompt_from_row(row))
    assert json.loads(group.messages_json) == MESSAGES
    assert (group.ground_truth, group.problem_type, json.loads(group.columns_json)) == ("A", "multiple choice",
                                                                                     {"level": 3})
    assert not group.HasField("data_source")
    medium = group.media[0]
    assert (medium.kind, medium.path, medium.fps, medium.max_frames, medium.total_pixels) == (
        "video", "/v.mp4", 2.0, 8, 10**10)
    assert not medium.HasField("min_pixels")


def test_frames_and_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = PromptRow(0, MESSAGES, (MediaRef("video", frames=("a.png", "b.png")),))
    assert list(to_group(prompt_from_row(row)).media[0].frame_paths) == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]


def test_a_minimum_of_frames_is_kept():
    row = PromptRow(5, MESSAGES, (MediaRef("video", "/v.mp4", min_frames=4),))
    assert to_group(prompt_from_row(row)).media[0].min_frames == 4


def test_text_puts_media_first_and_a_string_becomes_a_part():
    group = to_group(Prompt.text("Count.", Media("image", "/i.png"), ground_truth="2"))
    assert [part["type"] for part in json.loads(group.messages_json)[0]["content"]] == ["image", "text"]
    plain = to_group(Prompt([{"role": "user", "content": "Hi"}]))
    assert json.loads(plain.messages_json)[0]["content"] == [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize("build", [
    lambda: Media("audio", "/x"), lambda: Media("video"), lambda: Media("video", "/x", ("/y",)),
    lambda: to_group(Prompt.text("x", columns={"a": object()}))])
def test_mistakes_are_bad_input(build):
    with pytest.raises(BadInput):
        build()
