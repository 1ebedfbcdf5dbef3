"""A tiny Qwen2.5-VL with random weights, its layout in a slab, prompts of every kind, transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from rollplex.model import (
    ActorLayout,
    ModelConfig,
    PromptInputs,
    VisionLanguageModel,
    load_into,
    pack_groups,
    pack_responses,
    prefix_pass,
    read_model_config,
    suffix_forward,
    token_logprobs,
)

# isort: split
# After rollplex.model, which makes torchvision importable.
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

IMAGE, VIDEO, START, END = 190, 191, 192, 193
VOCAB = 203


def tiny_hf_config(*, tied: bool = False, layers: int = 3) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )


def build_hf(*, tied: bool, dtype: torch.dtype, layers: int = 3) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights, biases and norms included, so that nothing is hidden by a zero."""
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(tiny_hf_config(tied=tied, layers=layers)).to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if "norm" in name or "ln_q" in name else noise)
    model.set_attn_implementation("sdpa")
    return model.to(dtype).eval()


@dataclass
class Bound:
    """Our model with its weights in a slab."""

    config: ModelConfig
    layout: ActorLayout
    slab: torch.Tensor
    rollout_views: dict[str, torch.Tensor]
    model: VisionLanguageModel


def bind_model(checkpoint: Path, dtype: torch.dtype, *, tp: int = 1, rank: int = 0) -> Bound:
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, tp, str(dtype).removeprefix("torch."))
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    rollout_views = layout.views(slab)
    training_views = layout.training_views(rollout_views)
    load_into(checkpoint, config, training_views, tp_rank=rank, tp_size=tp)
    model = VisionLanguageModel(config, dtype)
    model.bind(training_views)
    return Bound(config, layout, slab, rollout_views, model)


def _text(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, IMAGE, count).tolist()


def make_prompt(config: ModelConfig, kind: str, seed: int = 0) -> PromptInputs:
    """kind: text | one_token | image | two_images | video | image_and_video"""
    rng = np.random.default_rng(seed)
    pixels = 3 * 2 * 4 * 4

    def medium(token: int, grid: list[int]) -> list[int]:
        return [START, *[token] * (int(np.prod(grid)) // 4), END]

    images = {"image": [[1, 6, 8]], "two_images": [[1, 4, 6], [1, 8, 4]], "image_and_video": [[1, 4, 4]]}.get(kind, [])
    videos = {"video": [[5, 4, 6]], "image_and_video": [[2, 6, 4]]}.get(kind, [])
    tokens = _text(rng, 1 if kind == "one_token" else 4)
    for grid in images:
        tokens += medium(IMAGE, grid) + _text(rng, 2)
    for grid in videos:
        tokens += medium(VIDEO, grid) + _text(rng, 3)
    arrays = {}
    if images:
        arrays["image_grid_thw"] = np.array(images)
        arrays["pixel_values_images"] = rng.standard_normal((np.prod(images, axis=1).sum(), pixels))
    if videos:
        arrays["video_grid_thw"] = np.array(videos)
        arrays["pixel_values_videos"] = rng.standard_normal((np.prod(videos, axis=1).sum(), pixels))
        arrays["second_per_grid_ts"] = np.array([1.7] * len(videos))
    return PromptInputs.from_arrays(config, token_ids=np.array(tokens), **arrays)


def make_responses(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, IMAGE, (length,), generator=generator) for length in lengths]


def exact_float64(set_attribute: Callable[[object, str, object], None]) -> None:
    """Let transformers keep float64 in norms and vision rotations, which it casts to float32."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)

    def rotate(q, k, cos, sin):
        cos, sin = (x.unsqueeze(-2).to(q.dtype) for x in (cos, sin))
        return q * cos + modeling.rotate_half(q) * sin, k * cos + modeling.rotate_half(k) * sin

    set_attribute(modeling.Qwen2_5_VLRMSNorm, "forward", norm)
    set_attribute(modeling, "apply_rotary_pos_emb_vision", rotate)


@dataclass
class Group:
    """One prompt, its responses, and a random weight for every response token, which makes the loss."""

    inputs: PromptInputs
    responses: list[torch.Tensor]
    weights: list[torch.Tensor]


def make_groups(config: ModelConfig, kinds: list[str], dtype: torch.dtype, lengths: list[int]) -> list[Group]:
    groups = []
    for seed, kind in enumerate(kinds):
        responses = make_responses(lengths, seed=10 + seed)
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(len(response), generator=generator, dtype=torch.float64).to(dtype) for response in responses]
        groups.append(Group(make_prompt(config, kind, seed), responses, weights))
    return groups


def oracle_logits(hf: Qwen2_5_VLForConditionalGeneration, groups: list[Group]) -> list[list[torch.Tensor]]:
    """[R_i, V] for every sample of every group: one right-padded row a sample, positions passed in."""
    rows, positions, media = [], [], {}
    for group in groups:
        inputs = group.inputs
        for response in group.responses:
            tokens = torch.cat((inputs.token_ids, response))
            tail = torch.arange(inputs.token_count, len(tokens)) + inputs.delta
            rows.append(tokens)
            positions.append(torch.cat((inputs.positions, tail.expand(3, -1)), dim=1))
            for name, value in (
                ("pixel_values", inputs.pixel_values_images),
                ("image_grid_thw", inputs.image_grid_thw),
                ("pixel_values_videos", inputs.pixel_values_videos),
                ("video_grid_thw", inputs.video_grid_thw),
            ):
                if value is not None:
                    media.setdefault(name, []).append(value)
    longest = max(map(len, rows))
    mask = torch.stack([torch.arange(longest) < len(row) for row in rows]).long()
    logits = hf(
        input_ids=torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]),
        attention_mask=mask,
        position_ids=torch.stack([F.pad(p, (0, longest - p.shape[1])) for p in positions], dim=1),
        use_cache=False,
        **{name: torch.cat(values) for name, values in media.items()},
    ).logits
    outputs, row = [], 0
    for group in groups:
        start = group.inputs.token_count - 1
        outputs.append([logits[row + i, start : start + len(r)] for i, r in enumerate(group.responses)])
        row += len(group.responses)
    return outputs


def oracle_loss(
    hf: Qwen2_5_VLForConditionalGeneration, groups: list[Group], temperature: float, forbidden: tuple[int, ...]
) -> torch.Tensor:
    """sum of weight * log p over all tokens of all samples."""
    total = torch.zeros((), dtype=hf.dtype)
    for group, samples in zip(groups, oracle_logits(hf, groups)):
        for logits, response, weights in zip(samples, group.responses, group.weights):
            scaled = (logits / temperature).index_fill(-1, torch.tensor(forbidden, dtype=torch.int64), -torch.inf)
            total = total + (scaled.log_softmax(-1).gather(-1, response[:, None])[:, 0] * weights).sum()
    return total


def two_stage_loss(
    model: VisionLanguageModel,
    groups: list[Group],
    temperature: float,
    forbidden: tuple[int, ...],
    *,
    saved: str = "keep",
    offload=None,
    micro_batch_tokens: int = 1 << 20,
    limit=None,
    groups_per_pass: int = 1,
) -> float:
    """The same loss through prefix, packed suffix and the two-stage backward; gradients land in the parameters. Micro-batches
    are of one group's samples, or of all of a pass's."""
    total = 0.0
    for start in range(0, len(groups), groups_per_pass):
        together = groups[start:start + groups_per_pass]
        prefix = prefix_pass(model, [group.inputs for group in together], saved, offload, limit)
        packed = [pack_responses(group.inputs.last_token, group.responses, group.inputs.suffix_position) for group in together]
        parts = [pack_groups(packed)] if len(packed) > 1 else packed[0].micro_batches(micro_batch_tokens)
        for part in parts:
            hidden = suffix_forward(model, prefix.boundaries, part, "keep" if saved == "keep" else "recompute")
            logp, _ = token_logprobs(model, hidden, part.targets, temperature=temperature, forbidden=forbidden, chunk_tokens=5)
            weights = torch.cat([group.weights[i] for group, samples in zip(together, part.by_group())
                                 for i in dict.fromkeys(samples.sample_index.tolist())])
            loss = (logp * weights).sum()
            loss.backward()
            total += float(loss.detach())
        prefix.backward()
        prefix.release()
    return total


def hf_gradients(hf: Qwen2_5_VLForConditionalGeneration) -> dict[str, torch.Tensor | None]:
    """By training name."""
    return {name.removeprefix("model."): parameter.grad for name, parameter in hf.named_parameters()}


def worst_gradient_error(
    ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None], vocab: int = VOCAB
) -> float:
    """Largest relative norm of a difference; a gradient on one side only is infinitely wrong."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, expected in theirs.items():
        found = ours[name]
        if expected is None or found is None:
            nothing = all(x is None or not x.any() for x in (expected, found))
            worst = max(worst, 0.0 if nothing else float("inf"))
            continue
        if name in ("language_model.embed_tokens.weight", "lm_head.weight"):
            assert not found[vocab:].any()
            found = found[:vocab]
        worst = max(worst, float((found - expected).norm() / expected.norm().clamp_min(1e-30)))
    return worst
