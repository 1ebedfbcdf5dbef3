"""What rollout hands to vLLM, its patches computed on the GPU beside other work: the host's to the bit, and the time of it."""

from __future__ import annotations

import time

import pytest
import torch
from fake_session import FakeSession
from figures import figure
from gpu_marks import NEEDS_GPU
from tiny_checkpoint import MEDIA, PromptMaker

from rollplex.data.processor import PromptProcessor
from rollplex.engine import PromptReader
from rollplex.model import read_model_config

vllm_prompts = pytest.importorskip("rollplex.rollout.vllm_prompts", reason="vLLM is not installed here")

GPU = pytest.param("cuda:0", marks=NEEDS_GPU)


@pytest.fixture
def made(tiny_checkpoint, monkeypatch):
    """made(device, dtype) -> VllmPrompts whose `read` gives the fields themselves; and the prompts' maker."""
    monkeypatch.setattr(vllm_prompts, "engine_input", lambda engine, token_ids, fields, media: fields)
    session, config = FakeSession(), read_model_config(tiny_checkpoint)
    processor = PromptProcessor.load(tiny_checkpoint, max_prompt_tokens=16384)
    yield PromptMaker(processor, session.add), lambda device, dtype: vllm_prompts.VllmPrompts(
        PromptReader(session, processor, config, device), config, dtype)
    session.close()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_patches_of_either_device_are_the_same(made, device, dtype):
    maker, prompts_of = made
    expected, found = prompts_of("cpu", dtype), prompts_of(device, dtype)
    for index, kind in enumerate(["text", "image", "video", "mixed"] * 3):
        if device != "cpu":
            # The stream that vLLM computes on is busy: nothing of this may wait for it, or read what it has yet to write.
            torch.cuda._sleep(20_000_000)
        group = maker.group(kind, index)
        (left, left_hash), (right, right_hash) = expected.read(None, group), found.read(None, group)
        assert left_hash == right_hash == group.prompt_hash
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert right[name].device.type == "cpu" and value.dtype == right[name].dtype
            assert torch.equal(value, right[name]), (kind, name)
            if device != "cpu" and name.startswith("pixel"):
                assert right[name].is_pinned()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_how_long_a_prompt_of_4000_tokens_takes(made, device, monkeypatch):
    monkeypatch.setitem(MEDIA, "long", (("video", (168, 112, 336)),))
    maker, prompts_of = made
    prompts = prompts_of(device, torch.bfloat16)
    groups = [maker.group("long", index) for index in range(4)]
    seconds = []
    for group in groups:
        began = time.perf_counter()
        fields, _ = prompts.read(None, group)
        seconds.append(time.perf_counter() - began)
        assert fields["video_grid_thw"].prod() // 4 == 4032
    figure("reading a prompt for vLLM", device=device, tokens=len(groups[0].token_ids), first_s=seconds[0],
           best_s=min(seconds[1:]))
