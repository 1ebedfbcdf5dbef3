"""Checkpoints with random weights, and videos of a wanted size."""

from __future__ import annotations

import json

import av
import pytest
import torch
from safetensors import safe_open

from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

from rollplex.bench import checkpoint as bench_checkpoint  # noqa: E402
from rollplex.bench import trl_run  # noqa: E402
from rollplex.bench.__main__ import _once  # noqa: E402
from rollplex.bench.checkpoint import HALVED, PUBLISHED, build_checkpoint, raw_config  # noqa: E402
from rollplex.bench.probe import stated  # noqa: E402
from rollplex.bench.tokenizer import SPECIAL_TOKENS, build_tokenizer  # noqa: E402
from rollplex.bench.trl_run import (  # noqa: E402
    EachImageOnce,
    ForcedLengths,
    collapsed,
    frames_of,
    make_dataset,
    use_causal_attention,
    use_tower_attention,
)
from rollplex.bench.videos import Clips, build_workload, choose_clips, fill_text  # noqa: E402
from rollplex.data.processor import PromptProcessor  # noqa: E402
from rollplex.model import ActorLayout, read_model_config  # noqa: E402
from rollplex.model.checkpoint import load_into, training_name  # noqa: E402
from rollplex.model.vision_block import window_attention  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    build_checkpoint(folder, "tiny", seed=0, device="cpu")
    return folder


@pytest.fixture(scope="module")
def workload(checkpoint):
    return build_workload(checkpoint.parent / "videos", checkpoint, prompt_tokens=300, groups=3, seed=0)


def test_our_model_reads_it_and_transformers_agrees(checkpoint):
    config = read_model_config(checkpoint)
    shards = ActorLayout.build(config, 1, "float32").shards
    views = {name: torch.full(shard.shape, torch.nan) for name, shard in shards.items()}
    load_into(checkpoint, config, views)
    assert not any(view.isnan().any() for view in views.values())
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    torch.testing.assert_close(model.model.language_model.layers[1].mlp.down_proj.weight,
                               views["language_model.layers.1.mlp.down_proj.weight"])


def test_logits_of_random_weights_are_near_one(checkpoint):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits
    assert 0.3 < float(logits.std()) < 3


def test_the_same_seed_gives_the_same_weights(checkpoint, tmp_path):
    build_checkpoint(tmp_path / "again", "tiny", seed=0, device="cpu")
    build_checkpoint(tmp_path / "other", "tiny", seed=1, device="cpu")

    def weights(folder) -> dict[str, torch.Tensor]:
        with safe_open(folder / "model-00001-of-00001.safetensors", "pt") as file:
            names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            return {name: file.get_tensor(name) for name in names}

    first, again, other = weights(checkpoint), weights(tmp_path / "again"), weights(tmp_path / "other")
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert {value.dtype for value in first.values()} == {torch.bfloat16}


def test_weights_are_cut_into_shards_that_all_arrive(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_checkpoint, "SHARD_BYTES", 16 << 10)
    total = build_checkpoint(tmp_path / "cut", "tiny", seed=0, device="cpu")
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > bench_checkpoint.WRITERS
    assert files == sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert index["metadata"]["total_size"] == total
    config = read_model_config(tmp_path / "cut")
    views = {name: torch.empty(shard.shape) for name, shard in ActorLayout.build(config, 1, "float32").shards.items()}
    load_into(tmp_path / "cut", config, views)


def test_trl_s_decoder_computes_the_same_without_a_mask(checkpoint):
    """Padded on the right: what stands there is read by nobody."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    tokens = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(24) < torch.tensor([[24], [17]])).long()
    with torch.inference_mode():
        expected = model(input_ids=tokens, attention_mask=mask).logits
        use_causal_attention(model)
        found = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, expected)


def test_trl_s_processor_works_on_an_image_once(checkpoint, workload):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint).image_processor
    asked = []

    class Spied:
        merge_size = processor.merge_size

        def __call__(self, images, **options):
            asked.append(len(images))
            return processor(images, **options)

    first, second = (frames_of(video)[:3] for video in workload["videos"][:2])
    images = [first, first, second, first[1:]]
    expected, once = processor(images, return_tensors="pt"), EachImageOnce(Spied())
    found = once(images, return_tensors="pt")
    assert (asked, once.merge_size) == ([6], processor.merge_size)
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(found["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("shape", [*PUBLISHED, *HALVED])
def test_published_shapes_have_qwens_special_tokens(shape):
    raw = raw_config(shape)
    tokenizer = build_tokenizer(raw["vocab_size"], raw["bos_token_id"], raw["max_position_embeddings"])
    assert len(tokenizer) == raw["vocab_size"]
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("im_end", "vision_start", "vision_end",
                                                                            "image_pad", "video_pad")}
    assert list(ids.values()) == [raw[key] for key in ("eos_token_id", "vision_start_token_id", "vision_end_token_id",
                                                       "image_token_id", "video_token_id")]
    assert tokenizer("héllo")["input_ids"] == tokenizer("h")["input_ids"] + tokenizer("é")["input_ids"] + tokenizer(
        "llo")["input_ids"]
    assert len(tokenizer("some text")["input_ids"]) == 9
    # Whatever is sampled can be decoded.
    assert tokenizer.decode([0, 1000, raw["bos_token_id"] + len(SPECIAL_TOKENS), raw["vocab_size"] - 1])


def test_a_prompt_has_as_many_tokens_as_asked_for(checkpoint, workload):
    assert workload["prompt_tokens"] == 300
    grid = workload["grid_thw"]
    assert workload["media_tokens"] == grid[0] * grid[1] * grid[2] // 4 > 200
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=300)
    assert processor.eos_token_ids[0] == 302
    assert len(set(workload["texts"])) == 3


def test_videos_have_the_frames_that_the_processor_counts(workload):
    clips = Clips(**workload["clips"])
    with av.open(workload["videos"][2]) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert (len(frames), frames[0].shape) == (clips.frames, (clips.height, clips.width, 3))
    assert (frames[0] != frames[-1]).any()
    assert clips.frames // 2 == workload["grid_thw"][0]


@pytest.mark.parametrize("tokens", [4, 15, 16, 17, 100, 900, 3900, 7900])
def test_clips_use_the_tokens_that_there_are(tokens):
    clips = choose_clips(tokens, 28)
    used = clips.frames // 2 * (clips.height // 28) * (clips.width // 28)
    assert 0.8 * tokens <= used <= tokens
    assert clips.frames <= 16
    assert clips.height <= clips.width <= 3 * clips.height


def test_too_short_a_prompt_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="ask for a longer prompt"):
        build_workload(tmp_path, checkpoint, prompt_tokens=40, groups=1, seed=0)


def test_text_fills_up_and_never_over():
    """Of a tokenizer that makes one token of three characters."""
    text = fill_text(lambda candidate: 7 + len(candidate) // 3, 50)
    assert 7 + len(text) // 3 == 50
    assert 7 + (len(text) + 1) // 3 == 51


def test_what_was_made_is_kept_and_other_options_make_it_again(tmp_path):
    made = []

    def make() -> dict:
        made.append(1)
        return {"answer": len(made)}

    assert [_once(tmp_path / "x", options, make)["answer"] for options in ({"a": 1}, {"a": 1}, {"a": 2})] == [1, 1, 2]
    (tmp_path / "x" / "made-by.json").unlink()
    assert _once(tmp_path / "x", {"a": 2}, make)["answer"] == 3


def test_a_gpu_is_known_by_its_longest_name():
    assert stated("NVIDIA H200")[1] == 4.8e12
    assert stated("NVIDIA H20")[1] == 4.0e12
    assert stated("NVIDIA H100 80GB HBM3")[1] == 3.35e12
    assert stated("Some other") == (None, None)


def test_trl_sees_frame_pairs_as_images_and_as_many_tokens(checkpoint, workload):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    row = make_dataset({"videos": workload["videos"], "texts": workload["texts"]})[1]
    assert len(row["images"]) == len(frames_of(workload["videos"][1])) == workload["clips"]["frames"] // 2
    content = [*({"type": "image", "image": image} for image in row["images"]),
               {"type": "text", "text": row["prompt"][0]["content"]}]
    tokens = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=True, return_dict=True,
                                           add_generation_prompt=True)
    assert len(tokens["input_ids"][0]) == workload["prompt_tokens"]


def test_placeholders_are_collapsed_run_by_run():
    assert collapsed([1, 9, 9, 9, 2, 3, 9, 9], 9) == [1, 9, 2, 3, 9]
    assert collapsed([9, 1], 9) == [9, 1]


def test_forced_lengths_end_each_row_at_its_own():
    force = ForcedLengths([1, 3], prompt_tokens=4, end=[5, 6])
    first = force(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 8))
    assert first[0].argmax() == 5 and torch.isfinite(first[0]).sum() == 1
    assert torch.isinf(first[1, [5, 6]]).all() and torch.isfinite(first[1]).sum() == 6
    third = force(torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 8))
    assert third[1].argmax() == 5


def test_trl_s_tower_computes_the_same_with_our_attention(checkpoint, monkeypatch):
    seen = []

    def spied(query, key, value, windows, scale):
        seen.append(windows.longest)
        return window_attention(query, key, value, windows, scale)

    monkeypatch.setattr(trl_run, "window_attention", spied)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    pixels, grid = torch.randn(2 * 12 * 16, 1176, generator=torch.Generator().manual_seed(0)), torch.tensor([[1, 12, 16]] * 2)
    with torch.inference_mode():
        expected = model.model.visual(pixels, grid_thw=grid).pooler_output
        use_tower_attention(model)
        found = model.model.visual(pixels, grid_thw=grid).pooler_output
    # A block of windows, a block of whole frames.
    assert seen == [64, 192]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [*PUBLISHED, *HALVED])
def test_published_shapes_hold_the_parameters_that_our_model_has(shape, tmp_path):
    config = Qwen2_5_VLConfig.from_dict(raw_config(shape))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    shards = ActorLayout.build(read_model_config(tmp_path), 1, "bfloat16").shards
    found = {training_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    assert found.keys() == shards.keys()
    padded = ("language_model.embed_tokens.weight", "lm_head.weight")
    assert all(found[name] == shard.full_shape for name, shard in shards.items() if name not in padded)
