"""The responses' share of a forward pass: packed samples over one group's boundary.

Legend: T packed tokens, D hidden, H query heads and K kv heads of this rank, d head size.
"""

from __future__ import annotations

from typing import Literal

import torch

from rollplex.model.activations import run_checkpointed, run_plain
from rollplex.model.attention import Pair, Seen, suffix_attention, suffix_mask
from rollplex.model.boundary import Boundary
from rollplex.model.network import Attend, VisionLanguageModel
from rollplex.model.packing import PackedSuffix


def suffix_forward(
    model: VisionLanguageModel,
    boundary: Boundary,
    packed: PackedSuffix,
    saved: Literal["keep", "recompute"] = "keep",
) -> torch.Tensor:
    """Final hidden states [T, D]. An attached boundary collects the gradients of its keys and values in its leaves."""
    cut = boundary.attached and torch.is_grad_enabled()
    keys_values = boundary.leaves() if cut else boundary.layers
    head_size = keys_values[0][0].shape[-1]
    seen = suffix_mask(boundary.token_count, packed.sample_index, packed.lengths, model.dtype, head_size)
    hidden_TD = model.language_model.embed_tokens(packed.token_ids)
    rope = model.rotary(packed.positions, model.dtype)
    run = run_checkpointed if saved == "recompute" else run_plain
    for layer, pair in zip(model.language_model.layers, keys_values, strict=True):
        hidden_TD = run(layer, hidden_TD, rope=rope, attend=_over_boundary(pair, seen))[0]
    return model.language_model.norm(hidden_TD)


def _over_boundary(boundary: Pair, seen: Seen) -> Attend:
    def attend(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        return suffix_attention(q_THd, boundary, (k_TKd, v_TKd), seen)

    return attend
