"""From logits to tokens: one uniform number a (seed, token index), and the log-probability that trainer computes too.

Legend: B rows, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollplex.core.errors import BadInput, InternalError
from rollplex.core.work import Sampling

_GAMMA, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(seeds_B: np.ndarray, token_index: int) -> np.ndarray:
    """float64 [B] in [0, 1): output `token_index` of SplitMix64 from each uint64 seed, without the outputs before it.

    A sample that is resumed, or decoded in another batch, so draws the same numbers.
    """
    with np.errstate(over="ignore"):
        z = seeds_B + _GAMMA * np.uint64(token_index + 1)
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)) * 2.0**-53


def check_sampling(sampling: Sampling) -> None:
    """Raises BadInput for a temperature, a limit or lengths that no engine samples with."""
    if not sampling.greedy and not sampling.temperature > 0:
        raise BadInput(f"temperature is {sampling.temperature}; it must be above 0", reason="BAD_SAMPLING")
    if sampling.max_response_tokens < 1:
        raise BadInput(f"max_response_tokens is {sampling.max_response_tokens}; it must be at least 1",
                       reason="BAD_SAMPLING")
    try:
        _ = sampling.lengths
    except ValueError as error:
        raise BadInput(str(error), reason="BAD_SAMPLING") from error


class TokenSampler:
    """Draws from softmax(logits / temperature) without the forbidden ids. Greedy: the largest, at temperature 1."""

    def __init__(self, sampling: Sampling, forbidden_token_ids: Sequence[int]) -> None:
        check_sampling(sampling)
        self.max_response_tokens = sampling.max_response_tokens
        self.lengths = sampling.lengths
        self._greedy = sampling.greedy
        self._temperature = 1.0 if sampling.greedy else sampling.temperature
        self._forbidden = torch.tensor(sorted(forbidden_token_ids), dtype=torch.int64)

    @torch.inference_mode()
    def __call__(
        self, logits_BV: torch.Tensor, seeds_B: np.ndarray, token_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token ids int64 [B] and their log-probabilities [B], in at least float32, on the host. The logits, wherever they are,
        are overwritten; all that is as large as they are is computed there.

        Raises InternalError when a chosen token has no finite log-probability: the weights are broken then.
        """
        self._forbidden = self._forbidden.to(logits_BV.device)
        logits_BV.index_fill_(1, self._forbidden, -torch.inf)
        wide = torch.promote_types(logits_BV.dtype, torch.float32)
        logp_BV = torch.log_softmax(logits_BV.to(wide) / self._temperature, dim=-1)
        tokens_B = logp_BV.argmax(-1) if self._greedy else _inverse_cdf(logp_BV, uniforms(seeds_B, token_index))
        tokens_B, logp_B = tokens_B.cpu(), logp_BV.gather(-1, tokens_B[:, None])[:, 0].cpu()
        if not torch.isfinite(logp_B).all():
            raise InternalError(f"non-finite log-probabilities at response token {token_index}",
                                reason="NON_FINITE_LOGITS", token_index=token_index)
        return tokens_B, logp_B


def _inverse_cdf(logp_BV: torch.Tensor, uniform_B: np.ndarray) -> torch.Tensor:
    """The first token whose cumulative probability exceeds u times the total; one of probability 0 never does."""
    cumulative_BV = logp_BV.exp().cumsum(-1, dtype=torch.float64)
    target_B1 = cumulative_BV[:, -1:] * torch.from_numpy(uniform_B).to(logp_BV.device)[:, None]
    found_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    return found_B.clamp(max=logp_BV.shape[-1] - 1)
