"""The demo's checkpoint directory loads with transformers, and the warm start sees what its processor makes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rollplex.demo.build import build_demo
from rollplex.demo.clips import BLOCK_ROWS, FRAME_PX, FRAMES, QUESTIONS, draw_clip
from rollplex.demo.prompts import QUESTION_TEMPLATE, TYPE_TEMPLATES, VIDEO_TOKENS, prompt_ids, response, user_text
from rollplex.demo.recipe import DemoRecipe
from rollplex.demo.videos import encoded_clip
from rollplex.demo.warmstart import WarmStartOptions, annotator_distribution, patches

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Qwen2_5_VLForConditionalGeneration  # isort: skip

QUICK = WarmStartOptions(clips=32, sight_steps=3, speech_steps=3, batch_rows=8)
RECIPE = DemoRecipe(train_rows=16, heldout_rows=16)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    calls: list[tuple] = []
    directory = tmp_path_factory.mktemp("demo")
    return build_demo(directory, seed=1, recipe=RECIPE, options=QUICK, progress=lambda *call: calls.append(call)), calls


def test_checkpoint_loads_as_it_was_saved(built):
    directory = built[0].checkpoint
    config, tokenizer = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory)
    assert config.model_type == "qwen2_5_vl" and config.text_config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32 and model.num_parameters() == built[0].parameters
    assert tokenizer.convert_ids_to_tokens(config.video_token_id) == "<|video_pad|>"
    ends = GenerationConfig.from_pretrained(directory).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_progress_counts_the_steps_of_both_parts(built):
    assert [call[:3] for call in built[1]] == [(part, n, 3) for part in ("sight", "speech") for n in (1, 2, 3)]


def test_responses_are_short_and_survive_the_tokenizer(built):
    tokenizer = AutoTokenizer.from_pretrained(built[0].checkpoint)
    for kind in QUESTIONS:
        for option in range(4):
            text = response(kind, option, option)
            ids = tokenizer(text)["input_ids"]
            assert len(ids) < RECIPE.max_response_tokens and tokenizer.decode(ids, skip_special_tokens=True) == text
            assert re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL)
    odd = "Größe 漢字 🙂 3.14"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd


def test_patches_and_prompt_equal_the_checkpoints_own_processor(built):
    from transformers import Qwen2_5_VLProcessor

    processor = Qwen2_5_VLProcessor.from_pretrained(built[0].checkpoint)
    frames = encoded_clip(draw_clip("order", 1, np.random.default_rng(0)))
    turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": user_text(QUESTIONS["order"])}]}
    text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    made = processor(text=[text], videos=[frames], return_tensors="pt")
    torch.testing.assert_close(patches(frames[None]), made["pixel_values_videos"], rtol=0, atol=1e-6)
    assert made["video_grid_thw"].tolist() == [[FRAMES // 2, FRAME_PX // 14, FRAME_PX // 14]]
    assert prompt_ids(processor.tokenizer, "order") == made["input_ids"][0].tolist()
    assert made["input_ids"].eq(processor.video_token_id).sum() == VIDEO_TOKENS


def test_prompt_equals_the_product_s_own(built):
    datasets = pytest.importorskip("rollplex.data.datasets")
    rows = datasets.read_dataset(
        Path(built[0].train),
        question_template=QUESTION_TEMPLATE,
        type_templates=TYPE_TEMPLATES,
    )
    texts = {part["text"] for row in rows for part in row.messages[-1]["content"] if part["type"] == "text"}
    assert texts == {user_text(question) for question in QUESTIONS.values()}


def test_annotator_says_nothing_to_who_does_not_look():
    shares = np.stack([annotator_distribution(right) for right in range(4)])
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(shares.mean(axis=0), 0.25)
    assert shares.diagonal().mean() == pytest.approx(0.30)
    assert (shares.argmax(axis=1) == np.arange(4)).tolist() == [True, False, False, False]


def test_same_seed_same_weights(built, tmp_path):
    again = build_demo(tmp_path, seed=1, recipe=RECIPE, options=QUICK)
    one, two = (Qwen2_5_VLForConditionalGeneration.from_pretrained(b.checkpoint).state_dict() for b in (built[0], again))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_iteration_holds_every_answer_equally_often():
    recipe = DemoRecipe()
    assert recipe.groups_per_iteration % BLOCK_ROWS == 0
    assert recipe.train_rows % recipe.groups_per_iteration == 0
