"""(prefix, suffix) and the two-stage backward against transformers' one forward pass, both on the same device: text, and real
videos through the processor. float32 without TF32 to rounding, bfloat16 within stated bounds. The same tests run on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from figures import figure
from gpu_marks import NEEDS_GPU
from tiny_checkpoint import save_tiny, tensor_parallel
from tiny_qwen import Group, hf_gradients, make_responses, oracle_logits, oracle_loss, two_stage_loss, worst_gradient_error

from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor
from rollplex.demo.videos import draw_rows, encoded_clip
from rollplex.engine import use_device
from rollplex.model import (
    ActorLayout,
    PromptInputs,
    VisionLanguageModel,
    load_into,
    pack_responses,
    prefix_forward,
    read_model_config,
    suffix_forward,
    token_logprobs,
)

# isort: split
# After rollplex.model, which makes torchvision importable.
from transformers import Qwen2_5_VLForConditionalGeneration

GPU = pytest.param("cuda:0", marks=NEEDS_GPU)
DEVICES = ["host:0", GPU]
LENGTHS = [3, 1, 40, 17]
BOUNDS = {torch.float32: SimpleNamespace(largest=1e-4, mean=1e-5), torch.bfloat16: SimpleNamespace(largest=0.2, mean=0.03)}
"""Of |log p - log p'| of a response's token. bfloat16: as rollout's tests hold it, for the same reasons."""
GRADIENTS, COSINE = 1e-3, 0.9
"""float32: ||dA - dB|| / ||dB|| of the worst parameter. bfloat16: the lowest cosine of a parameter's two gradients."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with tensor_parallel():
        yield save_tiny(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def prompts(checkpoint) -> list[PromptInputs]:
    """Three of the demo's videos, encoded and decoded as files are, and a text."""
    processor, config = PromptProcessor.load(checkpoint, max_prompt_tokens=2048), read_model_config(checkpoint)
    made = []
    for frames in [*(encoded_clip(clip) for _, _, clip in draw_rows(80, np.random.default_rng(0))[:3]), None]:
        items = [] if frames is None else [MediaItem("video", 0, frames.shape, 2.0, (), len(frames), None, "")]
        content = [*({"type": "video"} for _ in items), {"type": "text", "text": "Which direction do the shapes move?"}]
        tokens = processor.tokenize([{"role": "user", "content": content}], items).token_ids
        media = {}
        if items:
            pixels = processor.pixels(items, [frames])
            media = {"pixel_values_videos": pixels.pixel_values_videos, "video_grid_thw": pixels.video_grid_thw,
                     "second_per_grid_ts": processor.second_per_grid_ts(items)}
        made.append(PromptInputs.from_arrays(config, token_ids=tokens, **media))
    return made


def groups_of(prompts: list[PromptInputs], device: torch.device) -> list[Group]:
    groups = []
    for seed, inputs in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed)
        responses = [response.to(device) for response in make_responses(LENGTHS, seed=10 + seed)]
        weights = [torch.randn(length, generator=generator).to(device) for length in LENGTHS]
        groups.append(Group(inputs.to(device), responses, weights))
    return groups


class Oracle:
    """transformers' model, called with host tensors."""

    def __init__(self, checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self.dtype, self._device = torch.float32, device

    def __call__(self, **inputs):
        moved = {name: value.to(self._device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return SimpleNamespace(logits=self.model(**moved).logits.float().cpu())


def ours_on(checkpoint, dtype: torch.dtype, device: torch.device) -> VisionLanguageModel:
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, 1, str(dtype).removeprefix("torch."))
    views = layout.training_views(layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)))
    load_into(checkpoint, config, views)
    model = VisionLanguageModel(config, dtype, device)
    model.bind(views)
    return model


def our_logprobs(model: VisionLanguageModel, group: Group) -> np.ndarray:
    with torch.no_grad():
        boundary = prefix_forward(model, group.inputs, "recompute")
        packed = pack_responses(group.inputs.last_token, group.responses, group.inputs.suffix_position)
        logp, _ = token_logprobs(model, suffix_forward(model, [boundary], packed), packed.targets, temperature=1.0, forbidden=())
    return torch.cat([part.float().cpu() for part in packed.split(logp)]).numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_and_gradients_are_transformers(checkpoint, prompts, device, dtype):
    place, bounds = use_device(device), BOUNDS[dtype]
    oracle, model = Oracle(checkpoint, dtype, place), ours_on(checkpoint, dtype, place)
    host, groups = groups_of(prompts, torch.device("cpu")), groups_of(prompts, place)
    with torch.no_grad():
        expected = [np.concatenate([logits.log_softmax(-1).gather(-1, response[:, None])[:, 0].numpy()
                                    for logits, response in zip(samples, group.responses)])
                    for group, samples in zip(host, oracle_logits(oracle, host))]
    difference = np.abs(np.concatenate([our_logprobs(model, group) - logp for group, logp in zip(groups, expected)]))
    oracle_loss(oracle, host, 1.0, ()).backward()
    two_stage_loss(model, groups, 1.0, ())
    theirs = {name: None if grad is None else grad.float().cpu() for name, grad in hf_gradients(oracle.model).items()}
    ours = {name: None if p.grad is None else p.grad.float().cpu() for name, p in model.parameters_by_name().items()}
    vocab = model.config.vocab_size
    worst = worst_gradient_error(ours, theirs, vocab=vocab)
    cosine = min(float(torch.nn.functional.cosine_similarity(ours[name][:len(grad)].flatten(), grad.flatten(), dim=0))
                 for name, grad in theirs.items() if grad is not None and grad.any())
    figure("against transformers", device=device, dtype=str(dtype), tokens=difference.size, logprob_max=float(difference.max()),
           logprob_mean=float(difference.mean()), gradient_worst_relative=worst, gradient_lowest_cosine=cosine)
    assert difference.size == len(prompts) * sum(LENGTHS)
    assert difference.max() <= bounds.largest and difference.mean() <= bounds.mean
    assert worst <= GRADIENTS if dtype is torch.float32 else cosine >= COSINE
