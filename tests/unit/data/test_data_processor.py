"""Token ids from shapes and pixels from frames: both against Qwen2_5_VLProcessor called as a whole."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from rollplex.core.errors import BadInput
from rollplex.data.device_patches import DevicePatches, patches
from rollplex.data.limits import MediaLimits
from rollplex.data.media import MediaItem, view_frames
from rollplex.data.processor import PromptProcessor
from rollplex.data.rows import MediaRef


@pytest.fixture(scope="module")
def processor(checkpoint):
    return PromptProcessor.load(checkpoint, max_prompt_tokens=2000)


@pytest.fixture(scope="module")
def whole(checkpoint, processor):
    from transformers import Qwen2_5_VLProcessor

    return Qwen2_5_VLProcessor.from_pretrained(checkpoint)


def item(kind, *shape, fps=2.0):
    return MediaItem(kind, 0, (*shape, 3), fps if kind == "video" else None, (), shape[0], None, "")


def frames_of(items):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, entry.shape, np.uint8) for entry in items]


def user(*parts):
    content = [{"type": part} if part in ("image", "video") else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


CASES = {
    "text": ([], user("How are you?")),
    "one image": ([item("image", 1, 56, 84)], user("image", "What?")),
    "two images": ([item("image", 1, 56, 84), item("image", 1, 28, 28)], user("image", "or", "image", "?")),
    "video": ([item("video", 4, 56, 56)], user("video", "What?")),
    "odd video": ([item("video", 5, 28, 84, fps=0.7)], user("video", "What?")),
    "one frame": ([item("video", 1, 28, 28, fps=29.97)], user("video", "What?")),
    "two videos": ([item("video", 2, 28, 28, fps=3.0), item("video", 6, 56, 28)], user("video", "video", "?")),
    "mixed": (
        [item("video", 2, 28, 28, fps=1.6), item("image", 1, 84, 28), item("video", 3, 28, 56)],
        user("Look:", "video", "and", "image", "video", "?"),
    ),
    "to be resized": ([item("video", 2, 280, 140), item("image", 1, 30, 400)], user("video", "image", "?")),
}


@pytest.mark.parametrize("name", [name for name, (items, _) in CASES.items() if items])
def test_patches_of_a_device_are_the_processors(processor, name):
    """Bit for bit, also where the processor has to resize and therefore computes itself."""
    items, _ = CASES[name]
    frames = frames_of(items)
    uploaded = []
    device = DevicePatches(processor, lambda array: uploaded.append(array.dtype) or torch.from_numpy(array.copy()))
    assert device.exact == {"image": True, "video": True}
    uploaded.clear()
    found, expected = device.pixels(items, frames), processor.pixels(items, frames)
    assert set(uploaded) == {np.dtype(np.float32 if name == "to be resized" else np.uint8)}
    for kind, grid in (("images", "image_grid_thw"), ("videos", "video_grid_thw")):
        pixels, grids = getattr(expected, f"pixel_values_{kind}"), getattr(expected, grid)
        assert (pixels is None) == (getattr(found, f"pixel_values_{kind}") is None) == (getattr(found, grid) is None)
        if pixels is not None:
            assert torch.equal(getattr(found, f"pixel_values_{kind}"), torch.from_numpy(pixels))
            assert np.array_equal(getattr(found, grid), grids)


def test_a_processor_that_rounds_otherwise_is_left_to_compute(processor, monkeypatch):
    monkeypatch.setattr("rollplex.data.device_patches.patches", lambda frames, part: patches(frames, part) + 1e-7)
    assert DevicePatches(processor, torch.from_numpy).exact == {"image": False, "video": False}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_processor(processor, whole, name):
    items, messages = CASES[name]
    frames = frames_of(items)
    prompt, pixels = processor.tokenize(messages, items), processor.pixels(items, frames)
    images = [array[0] for entry, array in zip(items, frames) if entry.kind == "image"]
    videos = [array for entry, array in zip(items, frames) if entry.kind == "video"]
    metadata = [
        {"total_num_frames": entry.shape[0], "fps": entry.fps, "frames_indices": list(range(entry.shape[0]))}
        for entry in items
        if entry.kind == "video"
    ]
    text = whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    media = {"images": images} if images else {}
    media |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    expected = whole(text=[text], return_tensors="np", **media)
    assert prompt.prompt_text == text
    np.testing.assert_array_equal(prompt.token_ids, expected["input_ids"][0])
    assert prompt.token_ids.dtype == np.int64
    for ours, theirs in (
        (prompt.image_grid_thw, "image_grid_thw"),
        (pixels.image_grid_thw, "image_grid_thw"),
        (prompt.video_grid_thw, "video_grid_thw"),
        (pixels.video_grid_thw, "video_grid_thw"),
        (pixels.pixel_values_images, "pixel_values"),
        (pixels.pixel_values_videos, "pixel_values_videos"),
        (prompt.second_per_grid_ts, "second_per_grid_ts"),
    ):
        if theirs in expected:
            np.testing.assert_array_equal(ours, np.asarray(expected[theirs]))
        else:
            assert ours is None
    values = (pixels.pixel_values_images, pixels.pixel_values_videos)
    assert all(array is None or array.dtype == np.float32 for array in values)
    assert len(prompt.prompt_hash()) == 64


@pytest.mark.parametrize("cap", [True, False])
def test_grids_agree_for_every_size_and_frame_count(make_checkpoint, tmp_path, cap):
    video = {"cap_pixels_per_frame": cap, "max_video_tokens": 20}
    processor = PromptProcessor.load(make_checkpoint(tmp_path, video=video), max_prompt_tokens=10**6)
    sizes = [(28, 28), (28, 140), (56, 84), (140, 140), (30, 50), (14, 300), (224, 28)]
    items = [item("video", count, *size) for count in (1, 2, 3, 7, 8) for size in sizes]
    items += [item("image", 1, *size) for size in sizes]
    prompt = processor.tokenize(user(*(entry.kind for entry in items)), items)
    pixels = processor.pixels(items, [np.zeros(entry.shape, np.uint8) for entry in items])
    np.testing.assert_array_equal(prompt.video_grid_thw, pixels.video_grid_thw)
    np.testing.assert_array_equal(prompt.image_grid_thw, pixels.image_grid_thw)
    assert pixels.pixel_values_videos.shape == (prompt.video_grid_thw.prod(1).sum(), 3 * 2 * 14 * 14)
    assert (prompt.token_ids == processor.video_token_id).sum() == prompt.video_grid_thw.prod(1).sum() // 4


async def test_the_decoder_leaves_the_processor_nothing_to_resize(processor, decoder, video, image, tmp_path):
    limits = processor.fit_limits(MediaLimits())
    media = [
        MediaRef("video", str(video(width=150, height=90))),
        MediaRef("image", str(image(width=400, height=300))),
    ]
    with await decoder.decode(media, limits, [tmp_path], factor=processor.factor) as decoded:
        prompt = processor.tokenize(user("video", "image", "?"), decoded.items)
        frames = view_frames(decoded.fd, decoded.size_bytes, decoded.items)
        pixels = processor.pixels(decoded.items, frames)
        for entry, grid in zip(decoded.items, (prompt.video_grid_thw[0], prompt.image_grid_thw[0])):
            assert (entry.shape[1], entry.shape[2]) == (grid[1] * 14, grid[2] * 14)
            assert 28 * 28 <= entry.shape[1] * entry.shape[2] <= 16 * 28 * 28
        np.testing.assert_array_equal(pixels.video_grid_thw, prompt.video_grid_thw)
        assert prompt.second_per_grid_ts == [2 / decoded.items[0].fps]


def test_long_prompts_are_refused_with_the_numbers(checkpoint):
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=30)
    with pytest.raises(BadInput, match=r"tokens, the limit is 30 \(max_prompt_tokens\); 4 of them") as caught:
        processor.tokenize(user("video", "What?" * 8), [item("video", 4, 28, 56)])
    assert caught.value.reason == "PROMPT_TOO_LONG" and int(caught.value.metadata["tokens"]) > 30


@pytest.mark.parametrize(
    ("items", "messages", "message"),
    [
        ([], user("video", "x"), r"placeholders are \['video'\], its media are \[\]"),
        ([item("image", 1, 28, 28)], user("video", "x"), r"media are \['image'\]"),
        ([], user("  "), "empty"),
        ([], user("x <|video_pad|>"), r"vision token <\|video_pad\|>"),
    ],
)
def test_bad_prompts(processor, items, messages, message):
    with pytest.raises(BadInput, match=message):
        processor.tokenize(messages, items)


def test_frames_must_be_those_of_the_items(processor):
    with pytest.raises(ValueError, match="for items of"):
        processor.pixels([item("image", 1, 28, 28)], [np.zeros((1, 28, 56, 3), np.uint8)])


def test_token_ids_by_purpose(processor):
    vocabulary = processor._tokenizer.get_vocab()
    assert processor.eos_token_ids == (258, 256) == (vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"])
    assert processor.forbidden_token_ids == tuple(range(259, 264))
    assert (processor.image_token_id, processor.video_token_id, processor.vision_start_token_id) == (262, 263, 259)
    assert processor.pad_token_id == 256 and processor.factor == 28


def test_a_template_may_refuse(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turns') }}")
    with pytest.raises(BadInput, match="the chat template refuses the prompt: no system turns"):
        PromptProcessor.load(folder, max_prompt_tokens=100).tokenize(user("a"))
    (folder / "chat_template.jinja").write_text("media are dropped")
    with pytest.raises(BadInput, match=r"made 0 image placeholder\(s\) of 1 image"):
        PromptProcessor.load(folder, max_prompt_tokens=100).tokenize(user("image"), [item("image", 1, 28, 28)])


def test_response_text_has_no_special_tokens(processor):
    ids = processor._tokenizer("<think>hm</think> <answer>é</answer><|im_end|>")["input_ids"]
    assert processor.decode_text(np.array(ids)) == "<think>hm</think> <answer>é</answer>"


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["config.json"], "config.json"),
        (["tokenizer.json"], r"tokenizer.json or vocab.json \+ merges.txt"),
        (["preprocessor_config.json", "tokenizer_config.json"], "tokenizer_config.json, preprocessor_config.json or"),
    ],
)
def test_incomplete_checkpoints_name_the_files(checkpoint, tmp_path, gone, named):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(BadInput, match=f"incomplete, it lacks: {named}"):
        PromptProcessor.load(folder, max_prompt_tokens=10)


def edit(folder, name, **changes):
    content = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps(content))


def test_other_unusable_checkpoints(checkpoint, tmp_path):
    with pytest.raises(BadInput, match="not a directory"):
        PromptProcessor.load(tmp_path / "none", max_prompt_tokens=10)
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match="has no chat template"):
        PromptProcessor.load(folder, max_prompt_tokens=10)
    edit(folder, "tokenizer_config.json", chat_template=template)
    older = PromptProcessor.load(folder, max_prompt_tokens=100)
    assert older.tokenize(user("a")).prompt_text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="its processor does not load"):
        PromptProcessor.load(folder, max_prompt_tokens=10)
    edit(folder, "config.json", model_type="llama")
    with pytest.raises(BadInput, match="model_type 'llama'; 'qwen2_5_vl'"):
        PromptProcessor.load(folder, max_prompt_tokens=10)


def test_a_saved_processor_loads_again(whole, checkpoint, tmp_path):
    whole.save_pretrained(tmp_path)
    shutil.copy(checkpoint / "config.json", tmp_path)
    items, messages = CASES["mixed"]
    again = PromptProcessor.load(tmp_path, max_prompt_tokens=2000).tokenize(messages, items)
    first = PromptProcessor.load(checkpoint, max_prompt_tokens=2000).tokenize(messages, items)
    assert again.prompt_hash() == first.prompt_hash()
