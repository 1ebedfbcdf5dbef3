"""Two passes of flash attention, merged, against one softmax over all keys: with passes written out here, in float64 on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex.model import flash_suffix
from rollplex.model.attention import suffix_attention, suffix_mask
from rollplex.model.flash_suffix import Samples, Span

HEADS, KV_HEADS, SIZE = 4, 2, 8
LENGTHS = [3, 1, 7]


def scores(q: torch.Tensor, k: torch.Tensor, queries: Span, keys: Span, causal: bool) -> torch.Tensor:
    """[H, T, S], minus infinity where a sequence's query does not see a key."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(*(zip(span.starts, span.starts[1:]) for span in (queries, keys)), strict=True):
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        seen[q0:q1, k0:k1] = block.tril() if causal else block
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("thd,shd->hts", q, repeated).div(math.sqrt(q.shape[2])).masked_fill(~seen, -torch.inf)


def forward(q, k, v, queries, keys, *, causal):
    weights = scores(q, k, queries, keys, causal)
    return (torch.einsum("hts,shd->thd", weights.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)),
            weights.logsumexp(-1))


def backward(grad_out, out, log_sum, q, k, v, queries, keys, *, causal):
    """FlashAttention's equations (Dao et al. 2022, algorithm 4); gradients of a kv head are summed over its query heads."""
    group = q.shape[1] // k.shape[1]
    k_H, v_H = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = (scores(q, k, queries, keys, causal) - log_sum[..., None]).exp()
    dot = (grad_out * out).sum(-1).T[..., None]
    through = weights * (torch.einsum("thd,shd->hts", grad_out, v_H) - dot) / math.sqrt(q.shape[2])
    dk, dv = (torch.einsum("hts,thd->shd", a, b).unflatten(1, (-1, group)).sum(2) for a, b in ((through, q), (weights, grad_out)))
    return torch.einsum("hts,shd->thd", through, k_H), dk, dv


@pytest.fixture
def passes(monkeypatch):
    monkeypatch.setattr(flash_suffix, "_forward", forward)
    monkeypatch.setattr(flash_suffix, "_backward", backward)


@pytest.mark.parametrize("boundary_tokens", [0, 1, 13])
def test_two_passes_are_one_softmax_forward_and_backward(passes, boundary_tokens):
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> torch.Tensor:
        # Wide enough that one set of keys outweighs the other for some queries.
        return 3 * torch.randn(tokens, heads, SIZE, generator=generator, dtype=torch.float64)

    total = sum(LENGTHS)
    samples = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    inputs = [random(total, HEADS), *(random(tokens, KV_HEADS) for tokens in (boundary_tokens, boundary_tokens, total, total))]
    wanted, results = random(total, HEADS), []
    for seen in (Samples.of(boundary_tokens, LENGTHS, torch.device("cpu")),
                 suffix_mask(boundary_tokens, samples, LENGTHS, torch.float64, SIZE)):
        q, k_B, v_B, k_T, v_T = leaves = [x.clone().requires_grad_() for x in inputs]
        out = suffix_attention(q, (k_B, v_B), (k_T, v_T), seen)
        out.backward(wanted)
        # Without a boundary its gradients are nothing at all, and are zeros of no size.
        results.append([out.detach(), *(leaf.grad for leaf in leaves if len(leaf))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_boundary_that_takes_no_gradient_is_only_read(passes):
    seen = Samples.of(2, LENGTHS, torch.device("cpu"))
    q, k_T, v_T = (torch.ones(sum(LENGTHS), heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    boundary = (torch.ones(2, KV_HEADS, SIZE), torch.ones(2, KV_HEADS, SIZE))
    suffix_attention(q, boundary, (k_T, v_T), seen).sum().backward()
    assert boundary[0].grad is None and k_T.grad is not None


@pytest.mark.parametrize(("dtype", "size", "expected"), [
    (torch.bfloat16, 128, True), (torch.float16, 64, True), (torch.float32, 128, False), (torch.bfloat16, 20, False),
    (torch.bfloat16, 264, False)])
def test_what_flash_attention_takes(dtype, size, expected):
    assert flash_suffix.supports(dtype, size) is expected


def test_spans_of_samples():
    samples = Samples.of(5, LENGTHS, torch.device("cpu"))
    assert [(span.starts.tolist(), span.longest) for span in (samples.boundary, samples.packed, samples.each)] == [
        ([0, 5], 5), ([0, 11], 11), ([0, 3, 4, 11], 7)]
