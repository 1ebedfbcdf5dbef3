"""The prompt's share of a forward pass, done once a group: media, embeddings, all layers over the first P - 1 tokens.

The last layer stops at its keys and values: nothing after them is ever read for a prompt token. Several prompts go through it as
one row of tokens, each of which sees its own prompt alone.
Legend: P prompt tokens, B = P - 1 (of several prompts: their sum), D hidden, K kv heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Literal

import torch

from rollplex.core.errors import BadInput
from rollplex.memory.transfer import to_device
from rollplex.model.activations import HostCopies, Limit, Offload, run_checkpointed, run_offloaded, run_plain
from rollplex.model.attention import causal_over
from rollplex.model.boundary import Boundary, KeysValues, PrefixPass
from rollplex.model.inputs import PromptInputs
from rollplex.model.network import VisionLanguageModel
from rollplex.model.tower_share import encode_shared
from rollplex.model.vision import RunBlock

Saved = Literal["keep", "recompute", "offload", "from_inputs"]


def prefix_forward(model: VisionLanguageModel, inputs: PromptInputs, saved: Saved = "recompute", offload: Offload | None = None,
                   limit: Limit | None = None) -> Boundary:
    """`prefix_pass` of one prompt."""
    return prefix_pass(model, [inputs], saved, offload, limit).boundaries[0]


def prefix_pass(
    model: VisionLanguageModel,
    prompts: Sequence[PromptInputs],
    saved: Saved = "recompute",
    offload: Offload | None = None,
    limit: Limit | None = None,
) -> PrefixPass:
    """A boundary for each prompt; attached unless autograd is off. `saved` is what waits for the backward pass, all exact:

    keep         every activation
    recompute    layer inputs; layers run again in the backward pass
    offload      layer inputs, in `offload`'s host storage
    from_inputs  nothing but the prompts (patches and tokens); the whole prefix runs again from them

    Under `limit` blocks (the tower's and the decoder's) run on fewer SMs, but for what the backward pass runs, unless every
    activation is kept.
    """
    if saved not in ("keep", "recompute", "offload", "from_inputs"):
        raise BadInput(f"saved={saved!r}; expected keep, recompute, offload or from_inputs")
    plain, checkpointed = (partial(run, limit=limit or nullcontext) for run in (run_plain, run_checkpointed))
    made = partial(PrefixPass, token_counts=[inputs.token_count - 1 for inputs in prompts])
    if not (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())):
        with torch.no_grad():
            return made(_keys_values(model, prompts, plain))
    if saved == "from_inputs":
        with torch.no_grad():
            layers = _keys_values(model, prompts, plain)
        return made(layers, rebuild=partial(_keys_values, model, prompts, run_checkpointed))
    if saved == "offload":
        return made(_keys_values(model, prompts, partial(run_offloaded, offload or HostCopies(), checkpointed)))
    return made(_keys_values(model, prompts, plain if saved == "keep" else checkpointed))


def _keys_values(model: VisionLanguageModel, prompts: Sequence[PromptInputs], run: RunBlock) -> KeysValues:
    counts = [inputs.token_count - 1 for inputs in prompts]
    *inner, last = model.language_model.layers
    if not any(counts):
        return [_no_tokens(model) for _ in model.language_model.layers]
    hidden_BD = _embed(model, prompts, counts, run)
    positions = [inputs.positions[:, :count] for inputs, count in zip(prompts, counts, strict=True)]
    rope = model.rotary(_in_a_row(positions, dim=1), model.dtype)
    attend = causal_over([count for count in counts if count])
    layers = []
    for layer in inner:
        hidden_BD, k_BKd, v_BKd = run(layer, hidden_BD, rope=rope, attend=attend)
        layers.append((k_BKd, v_BKd))
    layers.append(run(last.keys_values, hidden_BD, rope=rope))
    return layers


def _embed(model: VisionLanguageModel, prompts: Sequence[PromptInputs], counts: Sequence[int], run: RunBlock) -> torch.Tensor:
    """[B, D] with media features in place of their placeholders."""
    tokens = _in_a_row([inputs.token_ids[:count] for inputs, count in zip(prompts, counts, strict=True)])
    hidden_BD = model.language_model.embed_tokens(tokens)
    pixels, grids, places = [], [], []
    for inputs, count, start in zip(prompts, counts, accumulate(counts, initial=0)):
        for token, of_medium, grid in (
                (model.config.image_token_id, inputs.pixel_values_images, inputs.image_grid_thw),
                (model.config.video_token_id, inputs.pixel_values_videos, inputs.video_grid_thw)):
            if of_medium is not None and len(grid):
                pixels.append(of_medium.to(hidden_BD.device, model.dtype))
                grids.append(grid)
                places.append(inputs.places_of(token, count) + start)
    if not pixels:
        return hidden_BD
    # All media in one pass: their gradients are added up in the same way whatever is saved.
    frozen = not any(p.requires_grad for p in model.visual.parameters())
    with torch.no_grad() if frozen else nullcontext():
        features = encode_shared(model.visual, _in_a_row(pixels), torch.cat(grids), run, model.group)
    # By indices from the host: backwards, a mask would have to be counted first, and the host would wait for it. index_copy would
    # keep the features until then.
    return hidden_BD.index_put((to_device(torch.cat(places), hidden_BD.device),), features)


def _in_a_row(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Of each prompt, one after the other; of one without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _no_tokens(model: VisionLanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    attention = model.language_model.layers[0].self_attn
    weight = attention.k_proj.weight
    shape = (0, weight.shape[0] // attention.size, attention.size)
    return weight.new_zeros(shape), weight.new_zeros(shape)
