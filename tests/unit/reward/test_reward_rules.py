"""Every rule against values worked out by hand, and the fast text searches against Video-R1's regular expressions."""

from __future__ import annotations

import random
import re
import time

import pytest

from rollplex.core.errors import BadInput
from rollplex.reward.rules import RULES
from rollplex.reward.rules.answer import answer_of, has_format, truth_of
from rollplex.reward.rules.ocr import edit_distance


@pytest.mark.parametrize(("response", "answer"), [
    ("<think>t</think><answer>A</answer>", "A"),
    ("<answer> A \n</answer> no, <answer>B</answer>", "A"),
    ("<answer>two\nlines</answer>", "two\nlines"),
    ("<answer></answer>", ""),
    ("A", ""),
    ("<answer>A", ""),
    ("</answer>A<answer>", ""),
    ("<answer>A <answer>B</answer>", "A <answer>B"),
    ("<Answer>A</Answer>", ""),
])
def test_first_answer_wins(response: str, answer: str) -> None:
    assert answer_of(response) == answer


@pytest.mark.parametrize(("ground_truth", "truth"), [
    ("<answer> B </answer>", "B"), (" B ", "B"), ("<answer>B", "<answer>B"),
])
def test_ground_truth_with_and_without_tags(ground_truth: str, truth: str) -> None:
    assert truth_of(ground_truth) == truth


@pytest.mark.parametrize("ground_truth", [None, "", "  ", "<answer> </answer>"])
def test_missing_ground_truth_is_an_error(ground_truth: str | None) -> None:
    with pytest.raises(BadInput) as caught:
        truth_of(ground_truth)
    assert caught.value.reason == "GROUND_TRUTH_MISSING"


@pytest.mark.parametrize(("response", "expected"), [
    ("<think>a</think>\n <answer>b</answer>", True),
    ("<think></think><answer></answer>", True),
    ("<think>a</think> then <answer>b</answer>", False),
    ("<think>a</think><answer>b</answer>\n", False),
    (" <think>a</think><answer>b</answer>", False),
    ("<think>a<answer>b</answer>", False),
    ("<think>a</think><answer>b</answer><answer>c</answer>", True),
    ("<answer>b</answer><think>a</think>", False),
    ("", False),
])
def test_format(response: str, expected: bool) -> None:
    assert has_format(response) is expected


def test_searches_equal_the_regular_expressions() -> None:
    pieces = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x", "think>", "<"]
    draw = random.Random(0)
    formatted = 0
    for _ in range(20000):
        text = "".join(draw.choices(pieces, k=draw.randrange(9)))
        if draw.random() < 0.5:
            text = f"<think>{text}</answer>"
        match = re.search(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)
        assert answer_of(text) == (match.group(1).strip() if match else ""), text
        expected = re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL) is not None
        assert has_format(text) is expected, text
        formatted += expected
    assert formatted > 100


def test_collapsed_response_is_searched_in_linear_time() -> None:
    started = time.monotonic()
    text = "<think>" + "</think> <answer>" * 50_000
    assert answer_of(text) == ""
    assert not has_format(text + "</answer>x")
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(("answer", "truth", "accuracy"), [
    ("B", "B", 1), ("b", "B", 0), ("B.", "B", 0), ("B. red", "B", 0), ("", "B", 0), ("AB", "B", 0),
])
def test_multiple_choice(answer: str, truth: str, accuracy: float) -> None:
    assert RULES["multiple choice"](answer, truth) == accuracy


@pytest.mark.parametrize(("answer", "truth", "accuracy"), [
    ("3", "3", 1),
    ("03", "3", 1),
    ("-3", "3", 0),
    ("3.", "3", 0),
    ("3.", "3.0", 1),
    ("3.0", "3", 0),
    ("1,000", "1000", 0),
    ("1000", "1,000", 0),
    ("1,000", "1000.0", 1),
    ("1,5", "15.0", 1),
    ("3.141", "3.14", 1),
    ("3.146", "3.14", 0),
    ("3e0", "3", 1),
    ("three", "3", 0),
    ("3 cats", "3", 0),
    ("", "3", 0),
    ("nan", "3", 0),
    ("inf", "3", 0),
    ("1e999", "3", 0),
])
def test_numerical(answer: str, truth: str, accuracy: float) -> None:
    assert RULES["numerical"](answer, truth) == accuracy


@pytest.mark.parametrize(("answer", "truth", "accuracy"), [
    ("STOP at the light", "STOP at the light", 1),
    ("STOP the light", "STOP at the light", 0.75),
    ("STOP  at\nthe light", "STOP at the light", 1),
    ("stop at the light", "STOP at the light", 0.75),
    ("the light STOP at", "STOP at the light", 0),
    ("a b c", "a b", 0.5),
    ("a b c d", "a b", 0),
    ("x y", "a b", 0),
    ("a x y z", "a b c", 0),
    ("", "a b", 0),
])
def test_ocr(answer: str, truth: str, accuracy: float) -> None:
    assert RULES["OCR"](answer, truth) == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize(("left", "right", "distance"), [
    ("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("abc", "abc", 0),
])
def test_edit_distance(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right) == edit_distance(right, left) == distance


def test_ocr_of_a_runaway_answer_is_cheap() -> None:
    started = time.monotonic()
    assert RULES["OCR"]("word " * 200_000, "word " * 1000) == 0
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(("answer", "truth", "accuracy"), [
    # ROUGE-1: 5 of 6 words; ROUGE-2: 3 of 5 bigrams; ROUGE-L: 5 of 6.
    ("the cat is on the mat", "the cat sat on the mat", (5 / 6 + 3 / 5 + 5 / 6) / 3),
    # Precision 2/2, recall 2/4, F 2/3; bigrams 1/1 and 1/3, F 1/2; as ROUGE-1.
    ("red ball", "red ball moves left", (2 / 3 + 1 / 2 + 2 / 3) / 3),
    ("run dog", "Running dogs!", 1),
    # One word has no bigrams.
    ("ball", "ball", 2 / 3),
    ("mat the on", "on the mat", (1 + 0 + 1 / 3) / 3),
    ("", "on the mat", 0),
    ("猫", "on the mat", 0),
])
def test_free_form(answer: str, truth: str, accuracy: float) -> None:
    assert RULES["free-form"](answer, truth) == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize(("answer", "truth", "accuracy"), [
    ("10", "10", 1), ("9", "10", 0.9), ("11", "10", 0.9), ("9.0", "10", 0.9), ("-10", "-10", 1), ("25", "10", 0),
    ("1,000", "1000", 1), ("ten", "10", 0), ("", "10", 0), ("inf", "10", 0), ("0", "0", 0),
])
def test_regression(answer: str, truth: str, accuracy: float) -> None:
    assert RULES["regression"](answer, truth) == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize(("problem_type", "truth"), [
    ("numerical", "three"), ("numerical", "50%"), ("numerical", "nan"), ("regression", "inf"),
    ("regression", "about 5"), ("free-form", "一只猫"), ("free-form", "?!"),
])
def test_unreadable_ground_truth_is_an_error_whatever_the_answer(problem_type: str, truth: str) -> None:
    for answer in (truth, "3", "3.5", ""):
        with pytest.raises(BadInput) as caught:
            RULES[problem_type](answer, truth)
        assert caught.value.reason == "GROUND_TRUTH_UNREADABLE"
        assert truth in str(caught.value)
