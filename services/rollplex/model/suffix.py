"""The responses' share of a forward pass: packed samples over their groups' boundaries.

Legend: T packed tokens, D hidden, H query heads and K kv heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rollplex.model.activations import run_checkpointed, run_plain
from rollplex.model.attention import Attend, Pair, Seen, packed_attention, packed_mask
from rollplex.model.boundary import Boundary
from rollplex.model.network import VisionLanguageModel
from rollplex.model.packing import PackedSuffix


def suffix_forward(
    model: VisionLanguageModel,
    boundaries: Sequence[Boundary],
    packed: PackedSuffix,
    saved: Literal["keep", "recompute"] = "keep",
) -> torch.Tensor:
    """Final hidden states [T, D]; `boundaries` of the groups in `packed`. An attached one collects the gradients of its keys and
    values in its leaves."""
    keys_values = [boundary.leaves() if boundary.attached and torch.is_grad_enabled() else boundary.layers
                   for boundary in boundaries]
    head_size = keys_values[0][0][0].shape[-1]
    seen = packed_mask([boundary.token_count for boundary in boundaries], packed, model.dtype, head_size)
    hidden_TD = model.language_model.embed_tokens(packed.token_ids)
    rope = model.rotary(packed.positions, model.dtype)
    run = run_checkpointed if saved == "recompute" else run_plain
    for layer, *pairs in zip(model.language_model.layers, *keys_values, strict=True):
        hidden_TD = run(layer, hidden_TD, rope=rope, attend=_over_boundaries(pairs, seen))[0]
    return model.language_model.norm(hidden_TD)


def _over_boundaries(boundaries: Sequence[Pair], seen: Seen) -> Attend:
    def attend(q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        return packed_attention(q_THd, boundaries, (k_TKd, v_TKd), seen)

    return attend
