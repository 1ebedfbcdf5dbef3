"""Log-probabilities of tokens under the temperature-scaled, vocabulary-parallel softmax, a chunk of tokens at a time.

Megatron's vocab_parallel_cross_entropy is not used: it computes in float32 whatever it is given, and in place.
Legend: T tokens, C tokens of a chunk, D hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rollplex.core.errors import BadInput
from rollplex.memory.transfer import to_device
from rollplex.model.megatron import reduce_from_tensor_model_parallel_region
from rollplex.model.network import VisionLanguageModel


def token_logprobs(
    model: VisionLanguageModel,
    hidden_TD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    forbidden: torch.Tensor | Sequence[int] | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) [T], differentiable, and the entropy [T] without gradient; at least float32.

    Forbidden ids and the vocabulary's padding have probability 0 and take no part in the normalisation.
    """
    if not temperature > 0:
        raise BadInput(f"temperature {temperature}: log-probabilities need one above 0")
    if chunk_tokens < 1:
        raise BadInput(f"chunk_tokens {chunk_tokens} is below 1")
    softmax = _VocabularySoftmax(model, temperature, forbidden, with_entropy)
    hidden_TD = model.copy_in(hidden_TD)
    parts = []
    for hidden_CD, targets_C in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(softmax, hidden_CD, targets_C, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(softmax(hidden_CD, targets_C))
    logp_T = torch.cat([logp for logp, _ in parts])
    return logp_T, torch.cat([entropy for _, entropy in parts]) if with_entropy else None


class _VocabularySoftmax:
    """This rank's slice of the vocabulary: its head rows and which of them may never be sampled."""

    def __init__(
        self,
        model: VisionLanguageModel,
        temperature: float,
        forbidden: torch.Tensor | Sequence[int] | None,
        with_entropy: bool,
    ) -> None:
        self.group, self.weight_VD = model.group, model.head_weight
        self.temperature, self.with_entropy = temperature, with_entropy
        self.rows = self.weight_VD.shape[0]
        self.first = model.tp_rank * self.rows
        ids = torch.arange(self.first, self.first + self.rows, device=self.weight_VD.device)
        self.banned_V = ids >= model.config.vocab_size
        if forbidden is not None and len(forbidden):
            forbidden = to_device(torch.as_tensor(forbidden, dtype=torch.int64), ids.device)
            self.banned_V |= torch.isin(ids, forbidden)

    def __call__(self, hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits_CV = F.linear(hidden_CD, self.weight_VD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / self.temperature
        logits_CV = logits_CV.masked_fill(self.banned_V, -torch.inf)
        peak_C = logits_CV.detach().amax(-1)
        self._reduce(peak_C, dist.ReduceOp.MAX)
        shifted_CV = logits_CV - peak_C[:, None]
        powers_CV = shifted_CV.exp()
        total_C = reduce_from_tensor_model_parallel_region(powers_CV.sum(-1), group=self.group)
        local_C = targets_C - self.first
        mine_C = (local_C >= 0) & (local_C < self.rows)
        picked_C = shifted_CV.gather(-1, local_C.clamp(0, self.rows - 1)[:, None])[:, 0]
        picked_C = torch.where(mine_C, picked_C, torch.zeros_like(picked_C))
        picked_C = reduce_from_tensor_model_parallel_region(picked_C, group=self.group)
        entropy_C = self._entropy(shifted_CV, powers_CV, total_C) if self.with_entropy else None
        return picked_C - total_C.log(), entropy_C

    @torch.no_grad()
    def _entropy(self, shifted_CV: torch.Tensor, powers_CV: torch.Tensor, total_C: torch.Tensor) -> torch.Tensor:
        weighted_C = (powers_CV * shifted_CV.masked_fill(self.banned_V, 0.0)).sum(-1)
        self._reduce(weighted_C, dist.ReduceOp.SUM)
        return total_C.log() - weighted_C / total_C

    def _reduce(self, values_C: torch.Tensor, op: dist.ReduceOp) -> None:
        if self.group.size() > 1:
            dist.all_reduce(values_C, op=op, group=self.group)
