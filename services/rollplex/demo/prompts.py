"""The demo's prompts and the responses its warm start imitates, as text and as token ids."""

from __future__ import annotations

from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from rollplex.demo.clips import COUNTS, FRAME_PX, FRAMES, LETTERS, ORDERS, QUESTIONS, Question

# Video-R1's prompt is the question, its options, an instruction of a hundred words, and a sentence by problem type.
# The demo asks the question alone: the instruction costs a small model on a CPU more than the video does, drowns the
# video's eight tokens, and tells of a format that the warm start teaches anyway.
QUESTION_TEMPLATE = "{Question}"
TYPE_TEMPLATES = {"multiple choice": "", "numerical": ""}
VIDEO_TOKENS = (FRAMES // 2) * (FRAME_PX // 28) ** 2
_NUMBER_WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}


def user_text(question: Question) -> str:
    """The text part of the user turn."""
    text, problem_type = question.text, "numerical"
    if question.options:
        problem_type = "multiple choice"
        text += "Options:\n" + "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, question.options))
    return QUESTION_TEMPLATE.format(Question=text) + TYPE_TEMPLATES[problem_type]


def thought(kind: str, answer: int) -> str:
    """What the warm start's annotator says to have seen, when the `answer`-th option of `kind` is right."""
    if kind == "count":
        return f"there are {_NUMBER_WORDS[COUNTS[answer]]}"
    if kind == "order":
        return f"first {ORDERS[answer][0]}"
    option = QUESTIONS[kind].options[answer]
    return f"they move {option}" if kind == "direction" else f"they are {option}"


def response(kind: str, seen: int, answered: int) -> str:
    """A response in Video-R1's format whose thought names option `seen` and whose answer is option `answered`."""
    return f"<think>{thought(kind, seen)}</think>\n<answer>{QUESTIONS[kind].answers[answered]}</answer>"


def prompt_ids(tokenizer: Qwen2Tokenizer, kind: str) -> list[int]:
    """Token ids of the whole prompt, the video's placeholder repeated once for each merged patch."""
    turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": user_text(QUESTIONS[kind])}]}
    text = tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    return tokenizer(text.replace("<|video_pad|>", "<|video_pad|>" * VIDEO_TOKENS))["input_ids"]


def corpus() -> list[str]:
    """Every text of the demo, for the tokenizer's training; what a response says weighs most, so that its words are whole."""
    answers = [response(kind, seen, answered) for kind in QUESTIONS for seen in range(4) for answered in range(4)]
    return [user_text(question) for question in QUESTIONS.values()] + answers * 4
