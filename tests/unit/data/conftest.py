"""Real files for the data tests: encoded videos, images, and a small Qwen2.5-VL processor checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from rollplex.data.decoder import MediaDecoder
from rollplex.data.limits import MediaLimits
from rollplex.data.rows import MediaRef

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(path: Path, *, frames=8, width=56, height=56, rate=4, codec="libx264", gop=None) -> Path:
    """A clip whose frame i is grey level 8 * i (mod 256) with a brighter left half."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        if gop:
            stream.gop_size = gop
        for index in range(frames):
            image = np.full((height, width, 3), 8 * index % 200, np.uint8)
            image[:, : width // 2] += 40
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


def save_image(path: Path, width=56, height=56, mode="RGB", seed=0) -> Path:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


def write_checkpoint(folder: Path, *, video: dict | None = None, image: dict | None = None) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    files = {
        "config.json": {"model_type": "qwen2_5_vl"},
        "generation_config.json": {"eos_token_id": [258, 256]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 28 * 28,
            "max_pixels": 16 * 28 * 28,
            **patches,
            **(image or {}),
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28},
            **patches,
            **(video or {}),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def video(tmp_path):
    return lambda name="clip.mp4", **options: encode(tmp_path / name, **options)


@pytest.fixture
def image(tmp_path):
    return lambda name="image.png", **options: save_image(tmp_path / name, **options)


@pytest.fixture(scope="session")
def make_checkpoint():
    return write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def small_limits():
    """Keeps 56x56 files at their size."""
    return MediaLimits(video_min_pixels=28 * 28, image_min_pixels=28 * 28, decode_timeout_s=20)


@pytest.fixture
async def decoder():
    async with MediaDecoder(workers=1) as running:
        yield running


@pytest.fixture
def clip_ref(video):
    return lambda name="clip.mp4", **options: MediaRef("video", str(video(name, **options)))
