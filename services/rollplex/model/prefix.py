"""The prompt's share of a forward pass, done once a group: media, embeddings, all layers over the first P - 1 tokens.

The last layer stops at its keys and values: nothing after them is ever read for a prompt token.
Legend: P prompt tokens, B = P - 1, D hidden, K kv heads of this rank, d head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch

from rollplex.core.errors import BadInput
from rollplex.memory.transfer import to_device
from rollplex.model.activations import HostCopies, Limit, Offload, run_checkpointed, run_offloaded, run_plain
from rollplex.model.attention import causal_attention
from rollplex.model.boundary import Boundary, KeysValues
from rollplex.model.inputs import PromptInputs
from rollplex.model.network import VisionLanguageModel
from rollplex.model.tower_share import encode_shared
from rollplex.model.vision import RunBlock

Saved = Literal["keep", "recompute", "offload", "from_inputs"]


def prefix_forward(
    model: VisionLanguageModel,
    inputs: PromptInputs,
    saved: Saved = "recompute",
    offload: Offload | None = None,
    limit: Limit | None = None,
) -> Boundary:
    """The boundary; attached unless autograd is off. `saved` is what waits for the backward pass, all exact:

    keep         every activation
    recompute    layer inputs; layers run again in the backward pass
    offload      layer inputs, in `offload`'s host storage
    from_inputs  nothing but the prompt (patches and tokens); the whole prefix runs again from it

    Under `limit` blocks (the tower's and the decoder's) run on fewer SMs, but for what the backward pass runs, unless every
    activation is kept.
    """
    if saved not in ("keep", "recompute", "offload", "from_inputs"):
        raise BadInput(f"saved={saved!r}; expected keep, recompute, offload or from_inputs")
    plain, checkpointed = (partial(run, limit=limit or nullcontext) for run in (run_plain, run_checkpointed))
    if not (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())):
        with torch.no_grad():
            return Boundary(_keys_values(model, inputs, plain))
    if saved == "from_inputs":
        with torch.no_grad():
            layers = _keys_values(model, inputs, plain)
        return Boundary(layers, rebuild=partial(_keys_values, model, inputs, run_checkpointed))
    if saved == "offload":
        return Boundary(_keys_values(model, inputs, partial(run_offloaded, offload or HostCopies(), checkpointed)))
    return Boundary(_keys_values(model, inputs, plain if saved == "keep" else checkpointed))


def _keys_values(model: VisionLanguageModel, inputs: PromptInputs, run: RunBlock) -> KeysValues:
    count = inputs.token_count - 1
    *inner, last = model.language_model.layers
    if not count:
        return [_no_tokens(model) for _ in model.language_model.layers]
    hidden_BD = _embed(model, inputs, count, run)
    rope = model.rotary(inputs.positions[:, :count], model.dtype)
    layers = []
    for layer in inner:
        hidden_BD, k_BKd, v_BKd = run(layer, hidden_BD, rope=rope, attend=causal_attention)
        layers.append((k_BKd, v_BKd))
    layers.append(run(last.keys_values, hidden_BD, rope=rope))
    return layers


def _embed(model: VisionLanguageModel, inputs: PromptInputs, count: int, run: RunBlock) -> torch.Tensor:
    """[B, D] with media features in place of their placeholders."""
    tokens = inputs.token_ids[:count]
    hidden_BD = model.language_model.embed_tokens(tokens)
    frozen = not any(p.requires_grad for p in model.visual.parameters())
    media = (
        (model.config.image_token_id, inputs.pixel_values_images, inputs.image_grid_thw),
        (model.config.video_token_id, inputs.pixel_values_videos, inputs.video_grid_thw),
    )
    for token, pixels, grid in media:
        if pixels is None or not len(grid):
            continue
        with torch.no_grad() if frozen else nullcontext():
            features = encode_shared(model.visual, pixels.to(hidden_BD.device, model.dtype), grid, run, model.group)
        # By indices from the host: backwards, a mask would have to be counted first, and the host would wait for it. index_copy
        # would keep the features until then.
        places = to_device(inputs.places_of(token, count), hidden_BD.device)
        hidden_BD = hidden_BD.index_put((places,), features)
    return hidden_BD


def _no_tokens(model: VisionLanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    attention = model.language_model.layers[0].self_attn
    weight = attention.k_proj.weight
    shape = (0, weight.shape[0] // attention.size, attention.size)
    return weight.new_zeros(shape), weight.new_zeros(shape)
