"""Attention of packed suffixes over [boundary; suffixes] as two passes of FlashAttention, over the boundary and within samples.

A softmax over two sets of keys is both softmaxes, weighted: with l_i the logarithm of set i's sum and l = log(exp l_1 + exp l_2),
out = exp(l_1 - l) out_1 + exp(l_2 - l) out_2, FlashAttention's own step from one block of keys to the next (Dao et al. 2022,
section 3.1). Backward, a set's pass needs l and rowsum(dout * out) of the whole and nothing of the other set, so it is given
`out` and l of the whole (as between devices in ring attention, Liu et al. 2023).

No tile is masked in vain, no key is copied, and the backward pass is shared out by query head (docs/adr/0014). FlashAttention
wants 16-bit numbers; others stay with FlexAttention.
Legend: T queries, B boundary tokens, H query heads, K kv heads of this rank, d head size, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.function import once_differentiable

from rollplex.memory.transfer import to_device
from rollplex.model.fused import fused_on_cuda

_DTYPES = (torch.bfloat16, torch.float16)


def supports(dtype: torch.dtype, head_size: int) -> bool:
    return dtype in _DTYPES and head_size % 8 == 0 and head_size <= 256


@dataclass(frozen=True)
class Span:
    """Rows that are sequences of their own."""

    starts: torch.Tensor
    """int32 [sequences + 1]: where each begins, and the end of the last."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Span:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(to_device(starts, device), max(lengths))


@dataclass(frozen=True)
class Samples:
    """Who sees whom: every query all of its group's boundary, and causally its own sample."""

    boundary: Span
    """A sequence a group."""
    packed: Span
    """A group's samples as one sequence: what looks at its boundary."""
    each: Span

    @classmethod
    def of(cls, boundary_tokens: Sequence[int], lengths: Sequence[Sequence[int]], device: torch.device) -> Samples:
        """`boundary_tokens`, `lengths` of the samples: of each group."""
        return cls(Span.of(boundary_tokens, device), Span.of([sum(group) for group in lengths], device),
                   Span.of([length for group in lengths for length in group], device))


def flash_suffix_attention(q_THd: torch.Tensor, boundary: tuple[torch.Tensor, torch.Tensor],
                           own: tuple[torch.Tensor, torch.Tensor], samples: Samples) -> torch.Tensor:
    """-> [T, H, d]. `boundary`: (k, v) [B, K, d] each, of all groups in order, `own`: (k, v) [T, K, d] each.

    Of several groups none may have an empty boundary: nothing is the sum over no keys, and its logarithm is no number.
    """
    return _TwoPasses.apply(q_THd, *boundary, *own, samples)


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_BKd, v_BKd, k_TKd, v_TKd, samples):
        out, log_sum = _forward(q, k_TKd, v_TKd, samples.each, samples.each, causal=True)
        if k_BKd.shape[0]:
            out, log_sum = merged(out, log_sum, *_forward(q, k_BKd, v_BKd, samples.packed, samples.boundary, causal=False))
        ctx.samples = samples
        ctx.save_for_backward(q, k_BKd, v_BKd, k_TKd, v_TKd, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k_BKd, v_BKd, k_TKd, v_TKd, out, log_sum = ctx.saved_tensors
        samples, whole = ctx.samples, (grad_out.contiguous(), out, log_sum)
        dq, dk_TKd, dv_TKd = _backward(*whole, q, k_TKd, v_TKd, samples.each, samples.each, causal=True)
        dk_BKd = dv_BKd = None
        if k_BKd.shape[0]:
            over, dk_BKd, dv_BKd = _backward(*whole, q, k_BKd, v_BKd, samples.packed, samples.boundary, causal=False)
            dq = dq.add_(over)
        return dq, dk_BKd, dv_BKd, dk_TKd, dv_TKd, None


@fused_on_cuda
def merged(out_THd: torch.Tensor, log_sum_HT: torch.Tensor, other_THd: torch.Tensor, other_HT: torch.Tensor
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over both sets of keys and its log-sum, of those over each."""
    share_TH1 = torch.sigmoid(log_sum_HT - other_HT).T[..., None]
    out = other_THd + share_TH1 * (out_THd.to(share_TH1.dtype) - other_THd)
    return out.to(out_THd.dtype), torch.logaddexp(log_sum_HT, other_HT)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Span, keys: Span, *, causal: bool
             ) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, d], logarithm of the softmax's sum, float32 [H, T]). torch's public varlen_attn is this call, but its backward
    pass takes no other set's keys into account."""
    # At one query a sequence the kernel would cut its work otherwise, and a group's bits depended on which groups it went with.
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.starts, keys.starts, max(queries.longest, 2), keys.longest, 0.0, causal, False)
    return out, log_sum


def _backward(grad_out: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, queries: Span, keys: Span, *, causal: bool) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of this set of keys; `out` and `log_sum` are of the whole."""
    # For dropout, of which there is none.
    generator_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, log_sum, queries.starts, keys.starts, queries.longest, keys.longest, 0.0, causal,
        generator_state, generator_state.new_empty(0))
