"""Two passes of flash attention, merged, against one softmax over all keys: with passes written out here, in float64 on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex.model import flash_suffix
from rollplex.model.attention import Apart, packed_attention, packed_mask, suffix_attention, suffix_mask
from rollplex.model.flash_suffix import Samples, Span
from rollplex.model.packing import PackedSuffix

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
    for seen in (Samples.of([boundary_tokens], [LENGTHS], torch.device("cpu")),
                 suffix_mask(boundary_tokens, samples, LENGTHS, torch.float64, SIZE)):
        q, k_B, v_B, k_T, v_T = leaves = [x.clone().requires_grad_() for x in inputs]
        out = suffix_attention(q, (k_B, v_B), (k_T, v_T), seen)
        out.backward(wanted)
        # Without a boundary its gradients are nothing at all, and are zeros of no size.
        results.append([out.detach(), *(leaf.grad for leaf in leaves if len(leaf))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def packed_groups(lengths: list[list[int]]) -> PackedSuffix:
    """Only what attention looks at."""
    index = torch.cat([torch.arange(len(group)).repeat_interleave(torch.tensor(group)) for group in lengths])
    return PackedSuffix(index, index, index, index.expand(3, -1), tuple(length for group in lengths for length in group),
                        tuple(map(len, lengths)))


@pytest.mark.parametrize("boundary_tokens", [(13, 2, 5), (4, 0, 6)], ids=str)
@pytest.mark.parametrize("flash", [True, False])
def test_groups_together_see_what_each_sees_alone(passes, boundary_tokens, flash):
    """Dense masks, or passes of flash attention: in one call where every group has a boundary."""
    generator, lengths = torch.Generator().manual_seed(0), [[3, 1, 7], [2], [4, 4]]
    packed, cpu = packed_groups(lengths), torch.device("cpu")

    def random(tokens: int, heads: int) -> torch.Tensor:
        return 3 * torch.randn(tokens, heads, SIZE, generator=generator, dtype=torch.float64)

    own = [random(packed.token_count, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    boundaries = [(random(tokens, KV_HEADS), random(tokens, KV_HEADS)) for tokens in boundary_tokens]
    wanted, results = random(packed.token_count, HEADS), []
    if flash and all(boundary_tokens):
        together = Samples.of(boundary_tokens, lengths, cpu)
    elif flash:
        together = Apart(tuple(Samples.of([tokens], [group], cpu) for tokens, group in zip(boundary_tokens, lengths)), (11, 2, 8))
    else:
        together = packed_mask(boundary_tokens, packed, torch.float64, SIZE)
    for alone in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*own, *(x for pair in boundaries for x in pair))]
        q, k, v, *rest = leaves
        pairs = list(zip(rest[::2], rest[1::2]))
        if alone:
            parts = zip(*(x.split([11, 2, 8]) for x in (q, k, v)), pairs, packed.by_group(), strict=True)
            out = torch.cat([suffix_attention(q, pair, (k, v), suffix_mask(len(pair[0]), group.sample_index, group.lengths,
                                                                            torch.float64, SIZE))
                             for q, k, v, pair, group in parts])
        else:
            out = packed_attention(q, pairs, (k, v), together)
        out.backward(wanted)
        results.append([out.detach(), *(leaf.grad for leaf in leaves if len(leaf))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_boundary_that_takes_no_gradient_is_only_read(passes):
    seen = Samples.of([2], [LENGTHS], torch.device("cpu"))
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
    samples = Samples.of([5], [LENGTHS], torch.device("cpu"))
    assert [(span.starts.tolist(), span.longest) for span in (samples.boundary, samples.packed, samples.each)] == [
        ([0, 5], 5), ([0, 11], 11), ([0, 3, 4, 11], 7)]
    samples = Samples.of([5, 9], [LENGTHS, [2, 2]], torch.device("cpu"))
    assert [(span.starts.tolist(), span.longest) for span in (samples.boundary, samples.packed, samples.each)] == [
        ([0, 5, 14], 9), ([0, 11, 15], 11), ([0, 3, 4, 11, 13, 15], 7)]
